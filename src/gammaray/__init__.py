"""gammaray: speculative decoding for many tenants, on a laptop CPU and on a rack of GPUs."""

__version__ = "0.1.0"

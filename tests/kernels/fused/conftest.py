"""Triton kernels run in its interpreter here, which must be on before `triton.jit` sees the first of them."""

import os

os.environ["TRITON_INTERPRET"] = "1"

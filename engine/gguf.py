"""GGUF checkpoints, converted once to safetensors in the user's cache folder.

Reading a GGUF through transformers takes many times longer than reading what it becomes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from gammaray.errors import ConfigError


def converted(gguf: Path) -> Path:
    """Folder with the safetensors, config and tokenizer of a GGUF; converted when it is not cached yet.

    Of several processes that need it at once, one converts and the others wait.
    """
    folder = cache_root() / f"{gguf.stem}-{_fingerprint(gguf)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if folder.is_dir():
            return folder
        work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".converting-"))
        try:
            _convert(gguf, work)
            work.rename(folder)  # at once: a process that is killed leaves no half folder
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """float32, because the values of a quantised block are not exact in 16 bits."""
    source, name = str(gguf.parent), gguf.name
    try:
        config = AutoConfig.from_pretrained(source, gguf_file=name, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name, local_files_only=True)
        weights = _weights(gguf, config)
    except (OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"cannot read {gguf}: {error}") from error
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # the weights are plain now; with this entry, transformers would look for quantised ones
    config.__dict__.pop("quantization_config", None)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _weights(gguf: Path, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Every parameter in float32. `from_pretrained(gguf_file=...)` does this too, but needs accelerate."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    checkpoint = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)
    tensors = checkpoint["tensors"]
    missing = set(model.state_dict()) - set(tensors) - set(model.all_tied_weights_keys)
    if missing:
        raise ConfigError(f"{gguf} lacks the weights {', '.join(sorted(missing))}")
    return {name: tensor.float().contiguous() for name, tensor in tensors.items()}


def _fingerprint(gguf: Path) -> str:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{gguf.stat().st_size}-{digest[:16]}-transformers-{transformers.__version__}"


def cache_root() -> Path:
    """Where what was converted is kept; nothing in it is lost when it is deleted."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gammaray" / "models"

"""Draft heads that are modules: the tensors of a folder or a Hugging Face id, by key, into one module."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gammaray import packaged
from gammaray.engine import loading
from gammaray.engine.drafters import int8_rows
from gammaray.errors import ConfigError

Tensors = dict[str, Tensor]
SHOWN = 4  # keys that a message names
TRAINERS = ("training_args", "optimizer", "scheduler")  # pickles that a trainer leaves beside the weights


def folder_of(model: str) -> Path:
    """The local folder of what a configuration names: a head that comes with gammaray (`packaged.head`), a
    folder, or a Hugging Face id. Raises ConfigError."""
    if own := packaged.head(model):
        return own
    place = loading.resolve(model)
    if Path(place).is_dir():
        return Path(place)
    try:
        return Path(snapshot_download(place, allow_patterns=["*.json", "*.safetensors", "*.bin", "*.pt"]))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot load {model!r}: there is no such folder, and no such Hugging Face id is downloaded or "
            f"can be ({type(error).__name__})"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises ConfigError."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} holds no checkpoint: it has no config.json") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {folder / 'config.json'}: {type(error).__name__}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder / 'config.json'} is not a JSON object")
    return config


def read_tensors(folder: Path, wanted: Callable[[str], bool] = lambda key: True) -> Tensors:
    """The `wanted` tensors of all safetensors files, else of all torch files, by key; those in 8 bits in
    float32 (`int8_rows`).

    Raises ConfigError for a file that is broken, or a pickle of more than tensors.
    """
    found: Tensors = {}
    files = sorted(folder.glob("*.safetensors"))
    pickles = [*folder.glob("*.bin"), *folder.glob("*.pt")]
    for path in files or sorted(path for path in pickles if not path.name.startswith(TRAINERS)):
        try:
            found |= (_from_safetensors if files else _from_pickle)(path, wanted)
        except (OSError, ValueError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
            raise ConfigError(f"cannot read the tensors in {path}: {type(error).__name__}") from error
    return int8_rows.plain(found, folder)


def _from_safetensors(path: Path, wanted: Callable[[str], bool]) -> Tensors:
    with safe_open(path, framework="pt") as file:
        keys = [key for key in file.keys() if wanted(key)]  # noqa: SIM118 - it is no mapping
        return {key: file.get_tensor(key) for key in keys}


def _from_pickle(path: Path, wanted: Callable[[str], bool]) -> Tensors:
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict) or not all(isinstance(x, Tensor) for x in loaded.values()):
        raise ValueError("more than tensors")
    return {key: x for key, x in loaded.items() if wanted(key)}


def fill(module: nn.Module, tensors: Mapping[str, Tensor], what: str, like: Tensor) -> None:
    """Give a module, which may be on the meta device, exactly these tensors, in the dtype and on the device
    of `like`. A linear layer gets a bias where the checkpoint has one.

    Raises ConfigError, beginning with `what`, for keys that are missing, unknown or of another shape.
    """
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear) and child.bias is None and f"{name}.bias" in tensors:
            child.bias = nn.Parameter(torch.empty(child.out_features, device="meta"))
    own = module.state_dict()
    if problem := _misfit({key: x.shape for key, x in own.items()}, tensors):
        raise ConfigError(f"{what} {problem}: give a checkpoint that was made for this target")
    module.load_state_dict({key: tensors[key].to(like) for key in own}, assign=True)
    module.requires_grad_(False).eval()


def _misfit(shapes: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> str:
    if missing := shapes.keys() - tensors.keys():
        return f"lacks {listed(missing)}"
    if unknown := tensors.keys() - shapes.keys():
        return f"has the unknown {listed(unknown)}"
    return ", ".join(
        f"has {key} of shape {list(tensors[key].shape)} where {list(shape)} fits"
        for key, shape in sorted(shapes.items())
        if tensors[key].shape != shape
    )


def listed(keys: Iterable[str]) -> str:
    """The first few, for a message."""
    names = sorted(keys)
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")

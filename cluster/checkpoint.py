"""How large a model is, read without loading it: no torch, no transformers, no network."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gammaray import packaged
from gammaray.cluster import gguf_header, safetensors_header
from gammaray.cluster.gguf_header import BROKEN
from gammaray.errors import ConfigError
from gammaray.validation import shorten

BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}  # auto is bfloat16 on GPUs
SIZE = re.compile(r"(?<![a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", re.IGNORECASE)
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Sizes; those that are None are unknown. Raises ValueError for one that no model has."""

    parameters: int  # 0: unknown
    stored: int | None = None  # bytes, when it is quantised and stays so
    layers: int | None = None
    heads: int | None = None  # of queries
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    vocabulary: int | None = None
    max_length: int | None = None  # tokens
    recurrent: bool = False  # keeps a state of fixed size, and no KV
    note: str | None = None  # what is not read but estimated

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            least = 0 if name == "parameters" else 1
            if type(size) is int and not least <= size < 2**63:
                raise ValueError(f"{name} cannot be {size}")

    @property
    def one_layer(self) -> Checkpoint:
        return replace(self, layers=1)

    def weights(self, dtype: str) -> int:
        """Bytes."""
        return self.stored or self.parameters * BYTES[dtype]

    def kv_per_token(self, dtype: str, shards: int = 1) -> int:
        """Bytes on each of `shards` GPUs, which divide the KV heads.

        Unknown shapes: 50 KB x (billions of parameters)^0.45 in 16 bits, which is within a factor of two for
        SmolLM2 135M and Llama 3 of 1, 8, 70 and 405 billion.
        """
        if self.recurrent:
            return 0
        if self.layers and self.kv_heads and self.head_dim:
            return 2 * self.layers * (self.kv_heads // shards) * self.head_dim * BYTES[dtype]
        estimate: float = 25_000 * (self.parameters / 1e9) ** 0.45 * BYTES[dtype]
        return math.ceil(estimate / shards)


def read(model: str) -> Checkpoint:
    """Sizes of an alias, a folder, a GGUF file, or a Hugging Face id: from the local cache, else its name.

    Raises ConfigError when it is broken, or when there is nothing to read and the name has no size.
    """
    try:
        return _read(model)
    except BROKEN as error:
        why = f"{type(error).__name__}: {shorten(str(error))}"
        raise ConfigError(f"cannot read the checkpoint {shorten(repr(model))}: {why}") from None


def _read(model: str) -> Checkpoint:
    path = Path(model).expanduser()
    if model in packaged.MODELS:
        return _gguf(packaged.gguf(model))
    if path.is_dir():
        return _folder(path, model)
    if path.suffix == ".gguf" and path.is_file():
        return _gguf(path)
    if model.startswith(("/", ".", "~")) or model.endswith(".gguf"):  # a path, never an id
        raise ConfigError(f"no such file or folder: {model}")
    cached = _cached(model)
    return _folder(cached, model) if cached else _by_name(model, "it is not in the local Hugging Face cache")


def read_head(path: str) -> Checkpoint:
    """Sizes of what continues a target's hidden states: one that comes with gammaray, a folder, or an id in
    the local cache.

    What is not there counts as nothing, as the name of a head tells the size of its target. Raises
    ConfigError when it is broken.
    """
    local = packaged.head(path) or Path(path).expanduser()
    try:
        folder = local if local.is_dir() else _cached(path)
        if folder is None:
            return Checkpoint(0, note=f"{path}: it is not on this machine, so its size is not counted")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = {**config, **config.get("transformer_layer_config", {})}  # as speculators writes it
        parameters, _ = _weights(folder, config)
        parameters += _shared_rows(folder, config)
        pickled = sum(file.stat().st_size for kind in ("*.bin", "*.pt") for file in folder.glob(kind))
        return replace(_shapes(config), parameters=parameters or pickled // BYTES["auto"])
    except BROKEN as error:
        why = f"{type(error).__name__}: {shorten(str(error))}"
        raise ConfigError(f"cannot read the draft head {shorten(repr(path))}: {why}") from None


def _shared_rows(folder: Path, config: Mapping[str, Any]) -> int:
    """Weights of the target's own head that one without a head copies: a row for each draft token."""
    found: dict[str, safetensors_header.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= safetensors_header.read_tensors(file)
    alone = "d2t" in found and "lm_head.weight" not in found
    return found["d2t"].elements * int(config["hidden_size"]) if alone else 0


def size_of_name(model: str) -> int | None:
    """Parameters that a name tells: 'Llama-3.1-70B', '8x7B' (an upper bound), '135M'."""
    found = SIZE.search(model.rstrip("/").rpartition("/")[2])
    if found is None:
        return None
    experts, size, unit = found.groups()
    return round(int(experts or 1) * float(size) * (1e9 if unit in "bB" else 1e6))


def _by_name(model: str, reason: str) -> Checkpoint:
    parameters = size_of_name(model)
    if not parameters:
        raise ConfigError(
            f"the size of {model!r} is unknown: {reason}, and its name has no size such as 8B; "
            "download it first, or give a folder or a GGUF file"
        )
    note = f"{model}: {reason}, so {parameters / 1e9:g} billion parameters are read off its name"
    return Checkpoint(parameters, note=f"{note}, and KV is estimated from that")


def _cached(model: str) -> Path | None:
    """The snapshot folder of a Hugging Face id. Looks at files only."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _gguf(path: Path) -> Checkpoint:
    """A GGUF is served unpacked, so that its quantisation saves no memory."""
    fields, parameters = gguf_header.read_header(path)
    if (parts := fields.get("split.count")) not in (None, 0, 1):
        raise ConfigError(f"{path} is one of {parts} parts: merge them with `llama-gguf-split --merge`")
    if parameters == 0:
        raise ConfigError(f"{path} has no tensors: give a GGUF file of a model")
    model = fields.get("general.architecture")

    def number(key: str) -> int | None:
        value = fields.get(f"{model}.{key}")
        return value if isinstance(value, int) else None

    heads, hidden = number("attention.head_count"), number("embedding_length")
    return Checkpoint(
        parameters,
        layers=number("block_count"),
        heads=heads,
        kv_heads=number("attention.head_count_kv") or heads,
        head_dim=number("attention.key_length") or (hidden // heads if hidden and heads else None),
        hidden=hidden,
        vocabulary=number("vocab_size"),
        max_length=number("context_length"),
    )


def _folder(folder: Path, model: str) -> Checkpoint:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shapes = _shapes({**config, **config.get("text_config", {})})
    parameters, stored = _weights(folder, config)
    if parameters == 0:
        known = _by_name(model, "its weights are not there")
        return replace(shapes, parameters=known.parameters, note=known.note)
    quantised = config.get("quantization_config") is not None
    return replace(shapes, parameters=parameters, stored=stored if quantised else None)


def _shapes(config: Mapping[str, Any]) -> Checkpoint:
    """Both spellings of transformers: Llama's and GPT-2's."""

    def number(*keys: str) -> int | None:
        return next((int(config[key]) for key in keys if config.get(key) is not None), None)

    heads, hidden = number("num_attention_heads", "n_head"), number("hidden_size", "n_embd")
    return Checkpoint(
        0,
        layers=number("num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=number("num_key_value_heads") or heads,
        head_dim=number("head_dim") or (hidden // heads if hidden and heads else None),
        hidden=hidden,
        vocabulary=number("vocab_size"),
        max_length=number("max_position_embeddings", "n_positions"),
        recurrent=heads is None and "state_size" in config,
    )


def _weights(folder: Path, config: Mapping[str, Any]) -> tuple[int, int]:
    """(parameters, bytes on disk); (0, 0) when no weights are there."""
    index = folder / INDEX
    if index.exists():
        data = json.loads(index.read_text(encoding="utf-8"))
        files = [folder / name for name in sorted(set(data["weight_map"].values()))]
        if not all(file.exists() for file in files):
            stored = int(data["metadata"]["total_size"])
            dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
            return stored // BYTES.get(dtype, 2), stored
    else:
        single = folder / WEIGHTS
        files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    headers = [safetensors_header.read_header(file) for file in files]
    return sum(count for count, _ in headers), sum(stored for _, stored in headers)

"""From the name of a model to a runner that has proven itself, and to its tokenizer."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import (
    disable_progress_bar,
    get_verbosity,
    set_verbosity,
    set_verbosity_error,
)

from gammaray import packaged
from gammaray.engine import gguf, invariance, selfcheck
from gammaray.engine.attention import Model
from gammaray.engine.device import CPU, check_combination, check_kernels, resolve_device, resolve_dtype
from gammaray.engine.hf import HuggingFaceModel
from gammaray.engine.lean import LeanModel, has_lean_form
from gammaray.engine.linear import InvariantLinears, pack_module
from gammaray.engine.parallel import ParallelRunner
from gammaray.engine.peers import ALONE, Alone, Link
from gammaray.engine.pool import KVPool, KVShape, bytes_per_block, default_num_blocks, usable_memory
from gammaray.engine.room import Footprint
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError, ModelUnsupported
from gammaray.kernels.invariant import by_rows
from gammaray.kernels.paths import AttentionSizes

logger = logging.getLogger(__name__)


def load_runner(
    model: str | PreTrainedModel,
    dtype: str | torch.dtype = "auto",
    block_size: int = 16,
    num_blocks: int | None = None,
    memory: float = 0.85,
    max_model_len: int | None = None,
    device: str | torch.device = "auto",
    deterministic: bool = False,
    ranks: Alone | Link = ALONE,
    beside: Sequence[Footprint] = (),
) -> ModelRunner:
    """Load a model and prove that it can be served.

    `model` is an alias, a local folder, a .gguf file, a Hugging Face id, or a loaded model, which is copied
    and stays as it is. device and dtype "auto": see `resolve_device`, `resolve_dtype`. `num_blocks` None: the
    share `memory` of what the device has left, where `beside` are models that will come to it with as many
    blocks. `deterministic`: each row of logits and the KV have the same bits in every batch. With `ranks`
    every one of them calls this, and gets its own part: rank 0 the runner to use, the others one to follow
    with. Raises ConfigError when the model cannot be found, and ModelUnsupported when its paged forward does
    not equal transformers' own, or is not deterministic.
    """
    place = resolve_device(device)
    check_combination(place, deterministic, ranks.size)
    precision = resolve_dtype(dtype, place)
    check_kernels(place, precision)
    first = ranks.together(lambda: load_model(model, precision, place))
    limit = _length_limit(first, max_model_len)
    vocab_size, eos = first.config.get_text_config().vocab_size, _eos(first)
    ranks.agree(f"{type(first).__name__} of {vocab_size} tokens, {limit} positions, {precision}")
    built = _build(first, lambda: load_model(model, precision, place), deterministic, ranks)
    if num_blocks is None:
        size = bytes_per_block(built.shapes, block_size, precision) + sum(other.block for other in beside)
        usable = max(0, usable_memory(place) - sum(other.weights for other in beside))
        share = memory / ranks.size
        num_blocks = ranks.together(lambda: default_num_blocks(size, block_size, limit, share, usable))
    blocks = ranks.least(num_blocks)
    make = partial(ParallelRunner, ranks) if isinstance(ranks, Link) and ranks.rank == 0 else ModelRunner
    return make(
        built.model,
        ranks.together(lambda: KVPool(built.shapes, blocks, block_size, precision, place)),
        vocab_size=vocab_size,
        max_model_len=limit,
        eos_token_ids=eos,
        sizes=built.sizes,
    )


def load_first(model: str, layers: int, dtype: torch.dtype, device: torch.device = CPU) -> PreTrainedModel:
    """The embeddings, the first layers, the norm and the head of a checkpoint. Raises ConfigError."""
    try:
        config: Any = AutoConfig.from_pretrained(resolve(model))
        text = config.get_text_config()
        if text.num_hidden_layers < layers:
            raise ConfigError(f"{model!r} has {text.num_hidden_layers} layers, fewer than {layers}")
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
        with _without_report():
            loaded: Any = AutoModelForCausalLM.from_pretrained(resolve(model), config=config, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ConfigError(_not_found("model", model, error)) from error
    cut: PreTrainedModel = loaded.to(device=device).eval()
    return cut


@contextmanager
def _without_report() -> Iterator[None]:
    """transformers warns of every tensor that is left out."""
    verbosity = get_verbosity()
    set_verbosity_error()
    try:
        yield
    finally:
        set_verbosity(verbosity)


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to what `load_runner` accepts as a name."""
    place = resolve(model)
    if Path(place).is_dir() and not any(Path(place).glob("*token*")) and not any(Path(place).glob("vocab*")):
        raise ConfigError(
            f"cannot load the tokenizer of {model!r}: the folder has none; put tokenizer.json and "
            "tokenizer_config.json there (a drafter has those of its target)"
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise ConfigError(_not_found("tokenizer", model, error)) from error
    return tokenizer


def load_config(model: str) -> PreTrainedConfig:
    """What `load_runner` would read of the text model, without its weights. Raises ConfigError."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(resolve(model)).get_text_config()
    except (OSError, ValueError) as error:
        raise ConfigError(_not_found("configuration", model, error)) from error
    return config


def resolve(model: str) -> str:
    """A folder or Hugging Face id for an alias, folder, .gguf file or id."""
    if model in packaged.MODELS:
        return str(gguf.converted(packaged.gguf(model)))
    path = Path(model).expanduser()
    if model.startswith(("/", ".", "~")) or model.endswith(".gguf"):  # a path, never an id
        if not path.exists():
            raise ConfigError(f"no such file or folder: {model}")
        return str(gguf.converted(path) if path.suffix == ".gguf" and path.is_file() else path)
    return model


@dataclass(frozen=True, slots=True)
class _Built:
    model: Model
    shapes: Sequence[KVShape]
    sizes: AttentionSizes | None  # None: not deterministic


@torch.inference_mode()
def _build(
    first: PreTrainedModel, again: Callable[[], PreTrainedModel], deterministic: bool, ranks: Alone | Link
) -> _Built:
    """The fastest form of a model that passes the checks. A form consumes the model it is made from."""
    name, config, reason = type(first).__name__, first.config.get_text_config(), ""
    try:
        truth = ranks.together(lambda: selfcheck.record_truth(first))
    except Exception as error:
        raise ModelUnsupported(f"{name} cannot be served, its own forward fails: {error}") from error
    part = ranks.together(lambda: ranks.cut(first))
    for form in _forms(config, deterministic, first.device):
        own = partial(lambda tried: ranks.cut(again()) if tried else part, reason)
        try:
            return ranks.together(partial(_proven, form, own, truth, deterministic))
        except (
            Exception
        ) as error:  # whatever a foreign model raises; its text, as a traceback would keep weights
            reason = str(error)
            logger.warning("%s: the form %s is rejected: %s", name, form.__name__.strip("_"), reason)
    how = "deterministically with" if deterministic else "with"
    raise ModelUnsupported(f"{name} cannot be served {how} paged attention: {reason}")


def _proven(
    form: Callable[[PreTrainedModel], Model],
    source: Callable[[], PreTrainedModel],
    truth: selfcheck.Truth,
    deterministic: bool,
) -> _Built:
    model = source()
    config, dtype = model.config.get_text_config(), model.dtype
    served = form(model)
    seen = selfcheck.probe(served, truth, config)
    selfcheck.check(served, truth, seen.shapes, dtype)
    sizes = None
    if deterministic:
        sizes = invariance.prove_attention(seen, dtype)
        invariance.check(served, seen.shapes, dtype, sizes, config.vocab_size)
    return _Built(served, seen.shapes, sizes)


def _forms(
    config: PreTrainedConfig, deterministic: bool, device: torch.device
) -> list[Callable[[PreTrainedModel], Model]]:
    """Ways to serve a model, the fastest first."""
    if deterministic:
        return [_invariant_lean, _invariant_packed] if has_lean_form(config) else [_invariant_packed]
    packed = [_packed] if device.type == "cpu" else []
    return [*([LeanModel] if has_lean_form(config) else []), *packed, HuggingFaceModel]


def _packed(model: PreTrainedModel) -> Model:
    pack_module(model)
    return HuggingFaceModel(model)


def _invariant_lean(model: PreTrainedModel) -> Model:
    linears = InvariantLinears()
    lean = LeanModel(model, linears.pack, partial(by_rows, F.silu))
    return invariance.RowPadded(lean, linears.rows)


def _invariant_packed(model: PreTrainedModel) -> Model:
    linears = InvariantLinears()
    pack_module(model, linears.pack)
    invariance.make_rows_independent(model)
    return invariance.RowPadded(HuggingFaceModel(model), linears.rows)


def load_model(
    model: str | PreTrainedModel, dtype: torch.dtype, device: torch.device = CPU
) -> PreTrainedModel:
    """The model itself, in transformers' own form. Raises ConfigError when it cannot be found."""
    if not sys.stderr.isatty():
        disable_progress_bar()
    if isinstance(model, PreTrainedModel):
        loaded: Any = copy.deepcopy(model)
        loaded.to(dtype=dtype, device=device)
    else:
        try:
            loaded = AutoModelForCausalLM.from_pretrained(resolve(model), dtype=dtype)
            loaded.to(device=device)
        except (OSError, ValueError) as error:
            raise ConfigError(_not_found("model", model, error)) from error
    evaluating: PreTrainedModel = loaded.eval()
    return evaluating


def _not_found(what: str, model: str, error: Exception) -> str:
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return (
        f"cannot load the {what} of {model!r}: {reason} (give an alias ({', '.join(packaged.MODELS)}), "
        "a folder, a .gguf file, or a Hugging Face id that is downloaded already or can be)"
    )


def _length_limit(model: PreTrainedModel, asked: int | None) -> int:
    """Tokens a sequence may have: RoPE that would rescale with the longest row of a batch ends before."""
    config = model.config.get_text_config()
    limit = int(getattr(config, "max_position_embeddings", None) or asked or 2048)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        limit = min(limit, int(rope.get("original_max_position_embeddings", limit)))
    return limit if asked is None else min(limit, asked)


def _eos(model: PreTrainedModel) -> tuple[int, ...]:
    generation = model.generation_config
    eos = generation.eos_token_id if generation is not None else model.config.eos_token_id
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)

"""The drafters of a configuration, one class a method. A request's depth and width come from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from gammaray.types import MAX_TREE_NODES
from gammaray.validation import Planned, Strict, shorten

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# static: the best `width` of every level. dynamic: the best depth * width of all that was drafted (EAGLE-2).
# sequoia: the shape that the measured acceptance of the k-th child makes best.
Tree = Literal["static", "dynamic", "sequoia"]
# What is learned from answers serves the request itself, or all later ones of its tenant, too.
Memory = Literal["request", "tenant"]
FOREIGN = {  # keys of vLLM's --speculative-config
    "model": "path",
    "num_speculative_tokens": "tenants.NAME.speculation.gamma",
    "prompt_lookup_max": "max_ngram",
    "prompt_lookup_min": "min_ngram",
}


class _Versioned(Strict):
    foreign: ClassVar[Mapping[str, str]] = FOREIGN
    version: str = Field(default="1", min_length=1, max_length=64)


class _Growing(_Versioned):
    """Has a distribution to grow trees from. `draft_sampling`: draw its tokens, else take the best."""

    tree: Tree = "static"
    draft_sampling: bool = False

    @model_validator(mode="after")
    def _samples_static_trees(self) -> _Growing:
        if self.draft_sampling and self.tree != "static":
            text = "draft_sampling needs tree: static, as a shape that follows what was drawn is not lossless"
            raise PydanticCustomError("tree", text)
        return self


class NgramDrafter(_Versioned):
    """Proposes what followed the last tokens earlier in the same sequence."""

    method: Literal["ngram"]
    max_ngram: int = Field(default=4, ge=1, le=32)
    min_ngram: int = Field(default=2, ge=1, le=32)

    @model_validator(mode="after")
    def _ordered(self) -> NgramDrafter:
        if self.min_ngram > self.max_ngram:
            raise PydanticCustomError("order", "min_ngram must not exceed max_ngram")
        return self


class SuffixDrafter(_Versioned):
    """Proposes what followed the longest suffix that was there before, by how often it did."""

    method: Literal["suffix"]
    memory: Memory = "request"
    max_tokens: int = Field(default=200_000, ge=1024)  # of a tenant's answers that are kept
    min_match: int = Field(default=1, ge=1, le=64)


class RecycleDrafter(_Versioned):
    """Proposes what the target once thought likely behind the same token (Token Recycling)."""

    method: Literal["recycle"]
    memory: Memory = "request"
    candidates: int = Field(default=8, ge=1, le=16)  # remembered behind each token


class LookaheadDrafter(_Versioned):
    """Lets the target itself guess ahead, in parallel (Jacobi), and proposes the n-grams that come of it."""

    method: Literal["lookahead"]
    window: int = Field(default=5, ge=1, le=16)  # W: columns that are guessed at once
    ngram: int = Field(default=3, ge=2, le=8)  # N: tokens of an n-gram, the last token included
    pool: int = Field(default=5, ge=1, le=32)  # G: n-grams that are kept for each token


class ModelDrafter(_Growing):
    """A smaller model with the target's vocabulary, of any architecture; also a recurrent one."""

    planned: ClassVar[Planned] = {"path": ()}
    method: Literal["model"]
    model: str = Field(min_length=1)
    dtype: Dtype = "auto"
    placement: Literal["auto", "split", "same-gpu"] = "auto"  # split: in a process of its own, in any case


class LayerExitDrafter(_Growing):
    """The first layers of the target itself, over the target's own pages."""

    method: Literal["layer_exit"]
    layers: int = Field(ge=1)
    path: str | None = Field(default=None, min_length=1)  # its own norm and head; None: the target's


class MedusaDrafter(_Versioned):
    """Heads on the target's last hidden state, each for one token further ahead."""

    method: Literal["medusa"]
    path: str = Field(min_length=1)


class EagleDrafter(_Growing):
    """One decoder layer that continues the target's last hidden states (EAGLE-1 and 2)."""

    method: Literal["eagle"]
    path: str = Field(min_length=1)
    tree: Tree = "dynamic"


class Eagle3Drafter(_Growing):
    """One decoder layer over hidden states of three of the target's layers (EAGLE-3)."""

    method: Literal["eagle3"]
    path: str = Field(min_length=1)
    dtype: Dtype | None = None  # None: the target's
    tree: Tree = "dynamic"


class MtpDrafter(_Growing):
    """The multi-token prediction layers that some checkpoints ship with."""

    method: Literal["mtp"]
    path: str | None = Field(default=None, min_length=1)  # None: the target's own checkpoint


class DsparkDrafter(_Versioned):
    """A block of tokens in one pass, with a Markov head between them and a confidence head (DSpark)."""

    method: Literal["dspark"]
    path: str = Field(min_length=1)
    draft_sampling: bool = False


class CompositeDrafter(_Versioned):
    """The trees of several drafters, merged under one node budget."""

    method: Literal["composite"]
    drafters: list[str] = Field(min_length=2, max_length=4)  # the first come first

    @model_validator(mode="after")
    def _differ(self) -> CompositeDrafter:
        if len(set(self.drafters)) < len(self.drafters):
            raise PydanticCustomError("drafters", "drafters: each only once")
        return self


METHODS = (
    *("ngram", "suffix", "recycle", "lookahead", "model", "layer_exit"),
    *("medusa", "eagle", "eagle3", "mtp", "dspark", "composite"),
)
WEIGHTLESS = frozenset({"ngram", "suffix", "recycle", "lookahead"})  # no weights of their own
_ANY = (
    NgramDrafter | SuffixDrafter | RecycleDrafter | LookaheadDrafter | ModelDrafter | LayerExitDrafter
    | MedusaDrafter | EagleDrafter | Eagle3Drafter | MtpDrafter | DsparkDrafter | CompositeDrafter
)  # fmt: skip


def _known_method(value: Any) -> Any:
    if isinstance(value, dict) and value.get("method") not in METHODS:
        method = value.get("method")
        shown = shorten(ascii(method)) if isinstance(method, str | None) else type(method).__name__
        context = {"method": shown, "known": f"{', '.join(METHODS[:-1])} or {METHODS[-1]}"}
        raise PydanticCustomError("method", "unknown or missing method {method}; use {known}", context)
    return value


Drafter = Annotated[_ANY, Field(discriminator="method"), BeforeValidator(_known_method)]


def check_nodes(gamma: int, width: int) -> None:
    if gamma * width > MAX_TREE_NODES:
        text = "gamma * width must be at most {limit} (got {gamma} * {width})"
        raise PydanticCustomError("nodes", text, {"limit": MAX_TREE_NODES, "gamma": gamma, "width": width})

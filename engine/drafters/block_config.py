"""The configurations of public block drafters, in the two layouts that there are.

DeepSpec (`architectures: [Qwen3DSparkModel]`) has all fields at the top. Its `target_layer_ids` l mean the
output of layer l, the first being 0 and -1 the embeddings; every place of a block is drafted.

speculators (`speculators_model_type: dspark` or `dflash`) has the backbone's in `transformer_layer_config`.
Its `aux_hidden_state_layer_ids` l mean the state after l layers. With `sample_from_anchor: false`, the
default of dflash, the first place only repeats the last committed token, and the others are drafted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import AutoConfig, PreTrainedConfig

from gammaray.errors import ConfigError
from gammaray.types import MAX_TREE_NODES

Count = Annotated[int, Field(ge=1)]
UNSTABLE = ("dynamic", "longrope")  # kinds of RoPE that rescale with the longest row of a batch


class _Loose(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, from_attributes=True)


class Backbone(_Loose):
    """Qwen3's decoder layer, whatever the model type says: with norms of each query and key head."""

    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    vocab_size: Count
    max_position_embeddings: Count
    rms_norm_eps: float
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    layer_types: tuple[Literal["full_attention"], ...] | None = None


class _Heads(_Loose):
    block_size: int = Field(ge=1, le=MAX_TREE_NODES)  # tokens of a block, each a bit of its attention mask
    mask_token_id: int = Field(ge=0)
    markov_head_type: str = "vanilla"
    confidence_head_with_markov: bool = False
    # gammaray's own: of each drafted place, for its confidence (see training/calibrate.py)
    confidence_temperatures: tuple[Annotated[float, Field(gt=0)], ...] = ()


class DeepSpec(_Heads):
    target_layer_ids: tuple[Annotated[int, Field(ge=-1)], ...] = Field(min_length=1)
    markov_rank: int = Field(ge=0)
    enable_confidence_head: bool


class Speculators(_Heads):
    aux_hidden_state_layer_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    draft_vocab_size: Count
    transformer_layer_config: dict[str, Any]
    sample_from_anchor: bool | None = None  # None: dspark does, dflash does not
    markov_rank: int = Field(default=256, ge=0)
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    projector_type: Literal["dflash"] = "dflash"


@dataclass(frozen=True, slots=True)
class BlockConfig:
    backbone: Backbone
    rope: PreTrainedConfig  # as transformers' rotary embeddings read it
    layers: tuple[int, ...]  # of the target, as `ModelRunner.forward_features` counts
    block_size: int
    mask_token: int
    from_anchor: bool  # the first place of a block is drafted too
    draft_vocab: int
    markov: str
    rank: int  # of the Markov head; 0: there is none
    confident: bool  # has a confidence head
    confidence_embeds: bool
    temperatures: tuple[float, ...] = ()  # of each drafted place's confidence; none: all 1

    @property
    def drafted(self) -> int:
        """Tokens that a block proposes."""
        return self.block_size if self.from_anchor else self.block_size - 1


def parse(config: Mapping[str, Any], path: str) -> BlockConfig:
    """Raises ConfigError."""
    kind = config.get("speculators_model_type")
    try:
        if kind in ("dspark", "dflash"):
            found = _speculators(config, kind == "dspark")
        elif config.get("architectures") == ["Qwen3DSparkModel"]:
            found = _deepspec(config)
        else:
            raise ConfigError(
                f"{path}: config.json has neither speculators_model_type dspark or dflash nor architectures "
                "[Qwen3DSparkModel], and no other layouts are known"
            )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: config.json: {where}: {first['msg']}") from error
    except (TypeError, ValueError) as error:  # of transformers
        raise ConfigError(f"{path}: config.json: {error}") from error
    _check(found, path)
    return found


def _check(found: BlockConfig, path: str) -> None:
    if found.rank and found.markov == "rnn" and not found.from_anchor:
        raise ConfigError(f"{path}: markov_head_type rnn needs sample_from_anchor: true")
    if found.mask_token >= found.backbone.vocab_size:
        raise ConfigError(f"{path}: mask_token_id {found.mask_token} is not in the vocabulary")
    if found.temperatures and len(found.temperatures) != found.drafted:
        raise ConfigError(f"{path}: confidence_temperatures must be {found.drafted}, one of each place")
    if not found.drafted:
        raise ConfigError(f"{path}: a block of block_size {found.block_size} drafts nothing")
    rope = getattr(found.rope, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type", "default")) in UNSTABLE:
        raise ConfigError(f"{path}: rope_type {kind} is not supported")


def _backbone(fields: Mapping[str, Any]) -> tuple[PreTrainedConfig, Backbone]:
    """What is equal to the model type's defaults may be missing from the file."""
    settings = AutoConfig.for_model(**{"model_type": "qwen3", **fields})
    return settings, Backbone.model_validate(settings)


def _deepspec(config: Mapping[str, Any]) -> BlockConfig:
    heads = DeepSpec.model_validate(config)
    settings, backbone = _backbone(config)
    return BlockConfig(
        backbone=backbone,
        rope=settings,
        layers=tuple(layer + 1 for layer in heads.target_layer_ids),
        block_size=heads.block_size,
        mask_token=heads.mask_token_id,
        from_anchor=True,
        draft_vocab=backbone.vocab_size,
        markov=heads.markov_head_type,
        rank=heads.markov_rank,
        confident=heads.enable_confidence_head,
        confidence_embeds=heads.confidence_head_with_markov,
        temperatures=heads.confidence_temperatures,
    )


def _speculators(config: Mapping[str, Any], sparks: bool) -> BlockConfig:
    heads = Speculators.model_validate(config)
    settings, backbone = _backbone(heads.transformer_layer_config)
    return BlockConfig(
        backbone=backbone,
        rope=settings,
        layers=heads.aux_hidden_state_layer_ids,
        block_size=heads.block_size,
        mask_token=heads.mask_token_id,
        from_anchor=sparks if heads.sample_from_anchor is None else heads.sample_from_anchor,
        draft_vocab=heads.draft_vocab_size,
        markov=heads.markov_head_type,
        rank=heads.markov_rank if sparks else 0,
        confident=sparks and heads.enable_confidence_head,
        confidence_embeds=heads.confidence_head_with_markov,
        temperatures=heads.confidence_temperatures,
    )

"""What a configuration asks of the hardware."""

from __future__ import annotations

import math

from gammaray.cluster import inside
from gammaray.cluster.checkpoint import Checkpoint, read, read_head
from gammaray.cluster.plans import Demand, DraftDemand, TargetDemand
from gammaray.config import Config, Tenant
from gammaray.drafter_config import ModelDrafter
from gammaray.errors import ConfigError

KEPT = 64  # entries of a sampled draft token's truncated q, see math.md
UNKNOWN_LENGTH = 8192  # tokens, when neither configuration nor checkpoint tells
MOST_TOKENS = 2**63 - 1  # beyond it floats of bytes overflow sooner or later
ID_BYTES, ENTRY_BYTES = 8, 8  # token and parent; token and probability
Q_BYTES = 4  # float32
MOST_SHARDS = 8  # as the configuration allows


def demand(config: Config, sizes: bool = True) -> Demand:
    """Target, and one entry for each tenant that drafts.

    `sizes` False leaves checkpoints unread and all bytes 0: enough where nothing has a GPU. Raises
    ConfigError when a checkpoint cannot be read, or when its heads cannot be divided as asked.
    """
    known = _read(config) if sizes else {}
    target = known.get(config.target.model, Checkpoint(0, max_length=UNKNOWN_LENGTH))
    tokens, assumed = _length(config, target)
    drafts = (_draft(config, name, tenant, tokens, known) for name, tenant in config.tenants.items())
    return Demand(
        target=_target(config, target, tokens),
        drafts=tuple(draft for draft in drafts if draft is not None),
        min_nvlink_version=config.placement.min_nvlink_version,
        notes=(*(found.note for found in known.values() if found.note), *assumed),
    )


def _read(config: Config) -> dict[str, Checkpoint]:
    """The target's, and those that some tenant drafts with; each once."""
    names = {tenant.drafter for tenant in config.tenants.values() if tenant.speculation.enabled}
    used = [drafter for name, drafter in config.drafters.items() if name in names]
    heads = [path for drafter in used for path in inside.heads(config, drafter)]
    models = [model for drafter in used for model in inside.models(config, drafter)]
    known = {path: read_head(path) for path in heads}
    return known | {model: read(model) for model in dict.fromkeys((config.target.model, *models))}


def _length(config: Config, target: Checkpoint) -> tuple[int, tuple[str, ...]]:
    """Tokens of the longest sequence, and a note when that is a guess."""
    if target.max_length is not None:
        return min(config.target.max_model_len or target.max_length, target.max_length), ()
    if config.target.max_model_len is not None:
        if config.target.max_model_len > MOST_TOKENS:
            raise ConfigError(f"target.max_model_len: expected at most {MOST_TOKENS} tokens")
        return config.target.max_model_len, ()
    note = f"the longest sequence is taken to have {UNKNOWN_LENGTH} tokens: set target.max_model_len"
    return UNKNOWN_LENGTH, (note,)


def _target(config: Config, checkpoint: Checkpoint, tokens: int) -> TargetDemand:
    target, shards = config.target, config.target.tensor_parallel
    _check_heads(checkpoint, target.model, shards)
    known = checkpoint.parameters > 0
    return TargetDemand(
        model=target.model,
        replicas=target.replicas,
        tensor_parallel=shards,
        weights=math.ceil(checkpoint.weights(target.dtype) / shards),
        kv=tokens * checkpoint.kv_per_token(target.dtype, shards) if known else 0,
        feature_bytes=(checkpoint.hidden or 0) * 2,
        q_bytes=(checkpoint.vocabulary or 0) * Q_BYTES,
    )


def _check_heads(checkpoint: Checkpoint, model: str, shards: int) -> None:
    """As the engine does at load, engine/sharding.py."""
    counts = [count for count in (checkpoint.heads, checkpoint.kv_heads) if count is not None]
    if any(count % shards for count in counts):
        every = range(1, MOST_SHARDS + 1)
        fitting = [str(n) for n in every if not any(count % n for count in counts)]
        raise ConfigError(
            f"target.tensor_parallel: {shards} does not divide the {checkpoint.heads} attention heads and "
            f"{checkpoint.kv_heads} key-value heads of {model}: use {' or '.join(fitting)}"
        )


def _draft(
    config: Config, name: str, tenant: Tenant, tokens: int, known: dict[str, Checkpoint]
) -> DraftDemand | None:
    if tenant.drafter is None or not tenant.speculation.enabled:
        return None
    drafter = config.drafters[tenant.drafter]
    if not isinstance(drafter, ModelDrafter):
        size = inside.size(config, drafter, tokens, known) if known else inside.Size()
        light = inside.is_light(config, drafter)
        return DraftDemand(
            name,
            tenant.drafter,
            drafter.method,
            light=light,
            weights=size.weights,
            kv=size.kv,
            wish="auto" if light else "same-gpu",
            workers=1 if light else config.target.replicas,
        )
    checkpoint = known.get(drafter.model, Checkpoint(0))
    nodes = tenant.speculation.gamma * tenant.speculation.tree_width
    return DraftDemand(
        name,
        tenant.drafter,
        drafter.method,
        light=False,
        weights=checkpoint.weights(drafter.dtype),
        kv=tokens * checkpoint.kv_per_token(drafter.dtype) if known else 0,
        wish=drafter.placement,
        workers=tenant.pool.workers,
        max_workers=tenant.pool.most,
        round_bytes=nodes * (ID_BYTES + (KEPT * ENTRY_BYTES if drafter.draft_sampling else 0)),
    )

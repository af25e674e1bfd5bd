"""From a configuration to a running Engine: weights, tokenizer, drafters, and the checks between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from gammaray.config import Config
from gammaray.drafter_config import WEIGHTLESS
from gammaray.drafter_config import Drafter as DrafterConfig
from gammaray.drafter_config import ModelDrafter as ModelDrafterConfig
from gammaray.engine import loading
from gammaray.engine.device import resolve_device, resolve_dtype
from gammaray.engine.drafters import recurrent, registry
from gammaray.engine.drafters.aside import AsideDrafter, CudaSide
from gammaray.engine.drafters.base import Drafter, Featured
from gammaray.engine.drafters.head_loading import folder_of, read_config
from gammaray.engine.drafters.model import CATCH_UP_TOKENS, ModelDrafter, check_vocabulary
from gammaray.engine.drafters.recurrent import RecurrentDrafter
from gammaray.engine.drafters.registry import Making
from gammaray.engine.drafters.switch import TenantDrafter
from gammaray.engine.engine import TOKEN_BUDGET, Engine, EngineOptions
from gammaray.engine.grammar import GrammarCompiler
from gammaray.engine.logits import SUPPORT
from gammaray.engine.parallel import WHOLE_PASSES, obey
from gammaray.engine.peers import ALONE, Alone, Link
from gammaray.engine.profile import measure
from gammaray.engine.ranks import Meeting, Seat, join
from gammaray.engine.recording import launches_kernels, record_passes
from gammaray.engine.recurrent import is_recurrent
from gammaray.engine.room import Footprint, end_footprint, footprint, head_footprint, layer_footprint
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError
from gammaray.kernels import verification
from gammaray.types import PolicySnapshot

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

UNTRIED = (
    "this version was never tried on a GPU: GAMMARAY_KERNELS=torch does without its kernels, "
    "CUDA_VISIBLE_DEVICES= without the GPU"
)


class TokenizerDecoder:
    """A tokenizer as the engine's TextDecoder."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


Pools = Mapping[tuple[str, str], Callable[[int], Drafter]]  # by tenant and drafter; of a vocabulary's size
NO_POOLS: Pools = MappingProxyType({})


def build_engine(
    config: Config, oracle: bool = False, ranks: Seat | None = None, pools: Pools = NO_POOLS
) -> Engine:
    """Load everything that `config` names. Raises ConfigError with what to change.

    `pools`: tenants whose drafter of that name lives elsewhere, and what reaches it.

    With tensor_parallel n > 1 this is rank 0: `ranks` is its seat at a meeting of n (`ranks.host`), and n - 1
    other processes are in `follow`, or will be soon. Then ConnectionError says that one of them is gone.
    """
    target = config.target
    if (seats := ranks.meeting.size if ranks else 1) != target.tensor_parallel:
        raise ConfigError(
            f"tensor_parallel {target.tensor_parallel} takes as many processes and here are {seats}: "
            "`gammaray serve` starts them, anything else needs tensor_parallel: 1"
        )
    if resolve_device().type == "cuda":
        log.warning(UNTRIED)
    runner = load_target(config, Link(ranks) if ranks else ALONE, _beside(config, pools))
    tokenizer = loading.load_tokenizer(target.model)
    drafters = {name: _for_all(name, config, pools, runner, tokenizer) for name in config.drafters}
    options = EngineOptions(
        name=target.model,
        max_batch=target.max_batch,
        token_budget=target.token_budget or TOKEN_BUDGET,
        prefix_cache=target.kv.prefix_cache,
        asynchronous=target.asynchronous,
        max_waiting=target.max_waiting,
        oracle=oracle,
    )
    eos = eos_ids(runner, tokenizer)
    grammars = GrammarCompiler(tokenizer, runner.vocab_size, eos)
    record_passes(runner, options.max_batch, options.token_budget, _continued(drafters.values()))
    if launches_kernels(runner):
        verification.warm_up(runner.vocab_size, SUPPORT, runner.dtype, runner.device)
    profile = measure(
        runner,
        options.token_budget,
        padded=runner.padded_tokens,
        rows=options.max_batch,
        wait=runner.wait,
    )
    engine = Engine(
        runner, TokenizerDecoder(tokenizer), eos, drafters, options, grammars=grammars, profile=profile
    )
    engine.apply(_fairness(config))
    return engine


def _continued(drafters: Iterable[Drafter]) -> list[int]:
    """Layers of the target whose hidden states some drafter continues."""
    return sorted({layer for one in drafters if isinstance(one, Featured) for layer in one.layers})


def _fairness(config: Config) -> PolicySnapshot:
    """What holds until a controller says more, if there is one."""
    tenants = config.tenants.items()
    return PolicySnapshot(
        weights={name: tenant.weight for name, tenant in tenants if tenant.weight != 1.0},
        kv_shares={name: tenant.kv_share for name, tenant in tenants if tenant.kv_share != 1.0},
    )


def follow(config: Config, rank: int, meeting: Meeting) -> None:
    """The whole life of another rank of the target: returns when rank 0 stops.

    Raises ReplicaLost when rank 0 is gone, and before that what `build_engine` raises.
    """
    link = Link(join(meeting, rank))
    obey(load_target(config, link), link)


def load_target(config: Config, ranks: Alone | Link = ALONE, beside: Sequence[Footprint] = ()) -> ModelRunner:
    target = config.target
    return loading.load_runner(
        target.model,
        dtype=target.dtype,
        block_size=target.kv.block_size,
        num_blocks=target.kv.num_blocks,
        memory=target.kv.memory,
        max_model_len=target.max_model_len,
        deterministic=target.deterministic,
        ranks=ranks,
        beside=beside,
    )


def _beside(config: Config, pools: Pools) -> list[Footprint]:
    """What will share a GPU with the target. A CPU's memory is taken as it is used."""
    device = resolve_device()
    if device.type == "cpu":
        return []
    here = [own for name, own in config.drafters.items() if not _elsewhere(name, config, pools)]
    found = (_footprint(part, config, device) for own in here for part in config.parts(own))
    return [one for one in found if one.weights]


def _footprint(own: DrafterConfig, config: Config, device: torch.device) -> Footprint:
    target, size = config.target, config.target.kv.block_size
    if own.method in WEIGHTLESS:
        return Footprint(0)
    if isinstance(own, ModelDrafterConfig):
        return footprint(loading.load_config(own.model), resolve_dtype(own.dtype, device), size)
    asked: str | None = getattr(own, "dtype", None)
    text, dtype = loading.load_config(target.model), resolve_dtype(asked or target.dtype, device)
    path: str | None = getattr(own, "path", None)
    if own.method == "layer_exit":
        return end_footprint(text, dtype) if path else Footprint(0)
    if own.method == "mtp" or path is None:
        return layer_footprint(text, dtype, size)
    folder = folder_of(path)
    layers = {"medusa": 0, "dspark": None}.get(own.method, 1)
    return head_footprint(folder, read_config(folder), layers, dtype, size)


def _for_all(
    name: str, config: Config, pools: Pools, target: ModelRunner, tokenizer: PreTrainedTokenizerBase
) -> Drafter:
    """A drafter of this process, unless it lives elsewhere for some tenants, or for all that use it."""
    size = target.vocab_size
    by_tenant = {tenant: reach(size) for (tenant, other), reach in pools.items() if other == name}
    if _elsewhere(name, config, pools):
        return TenantDrafter(by_tenant, size)
    own = build_drafter(name, config, target, tokenizer)
    if config.target.asynchronous and isinstance(own, ModelDrafter) and target.device.type == "cuda":
        own = AsideDrafter(own, CudaSide(target.device))
    return TenantDrafter(by_tenant, size, own) if by_tenant else own


def _elsewhere(name: str, config: Config, pools: Pools) -> bool:
    """Whether all tenants that use a drafter have it outside of this process."""
    tenants = {tenant for tenant, other in pools if other == name}
    return bool(tenants) and not config.drafting_with(name) - tenants


def eos_ids(runner: ModelRunner, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a sequence: the tokenizer's and those of the model's generation config."""
    own = tokenizer.eos_token_id
    return frozenset(runner.eos_token_ids) | ({own} if own is not None else set())


def build_drafter(
    name: str, config: Config, target: ModelRunner, tokenizer: PreTrainedTokenizerBase
) -> Drafter:
    """One configured drafter in the target's process. Raises ConfigError and its kin with what to change."""
    own = config.drafters[name]
    if own.method == "layer_exit" and config.target.tensor_parallel > 1:
        raise ConfigError(f"drafter {name!r}: {WHOLE_PASSES}")
    drafter = registry.make(
        Making(
            name=name,
            config=own,
            target=target,
            model=config.target.model,
            tokenizer=tokenizer,
            prefix_cache=config.target.kv.prefix_cache,
            max_batch=config.target.max_batch,
            others=lambda other: build_drafter(other, config, target, tokenizer),
        )
    )
    if isinstance(drafter, Featured) and drafter.layers:
        try:
            target.check_layers(drafter.layers)
        except ConfigError as error:
            raise ConfigError(f"drafter {name!r} continues the target's hidden states: {error}") from error
    return drafter


def build_apart(config: Config, name: str) -> ModelDrafter | RecurrentDrafter:
    """A drafter for a process of its own: of the target it reads the vocabulary only.

    Raises VocabularyMismatch, ConfigError.
    """
    settings, target = config.drafters[name], config.target
    if not isinstance(settings, ModelDrafterConfig):
        raise ConfigError(f"drafter {name!r} has no model of its own, so it has no draft workers")
    size, tokenizer = loading.load_config(target.model).vocab_size, loading.load_tokenizer(target.model)
    if is_recurrent(loading.load_config(settings.model)):
        drafter = recurrent.load(settings)
        check_vocabulary(name, settings.model, drafter.runner.vocab_size, size, tokenizer)
        return drafter
    runner = loading.load_runner(
        settings.model,
        dtype=settings.dtype,
        block_size=target.kv.block_size,
        num_blocks=target.kv.num_blocks,
        memory=target.kv.memory,
    )
    check_vocabulary(name, settings.model, runner.vocab_size, size, tokenizer)
    record_passes(runner, target.max_batch, CATCH_UP_TOKENS)
    return ModelDrafter(runner, settings.draft_sampling, target.kv.prefix_cache, settings.tree)

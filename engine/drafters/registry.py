"""Every drafter by its method. A drafter is registered by an entry here and one in the losslessness suite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gammaray.engine.drafters.base import Drafter
from gammaray.engine.drafters.provenance import check_target
from gammaray.engine.runner import ModelRunner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# method -> the module that has `make(making: Making) -> Drafter`, imported when it is needed
MODULES: Mapping[str, str] = {
    "ngram": "ngram",
    "suffix": "suffix",
    "recycle": "recycle",
    "lookahead": "lookahead",
    "composite": "composite",
    "model": "model",
    "medusa": "medusa",
    "dspark": "dspark",
    "layer_exit": "layer_exit",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "mtp": "mtp",
}


@dataclass(frozen=True, slots=True)
class Making:
    """What a drafter in the target's process is made from."""

    name: str  # of the drafter, in the configuration
    config: Any  # its entry there: the class of `gammaray.drafter_config` that has its method
    target: ModelRunner
    model: str  # the target's name, as `loading.resolve` knows it
    tokenizer: PreTrainedTokenizerBase
    prefix_cache: bool = True
    max_batch: int = 64
    others: Callable[[str], Drafter] | None = None  # makes another drafter of the configuration, by its name


def make(making: Making) -> Drafter:
    """Raises ConfigError, VocabularyMismatch or ModelUnsupported with what to change."""
    check_target(making.name, making.config, making.model)
    module = import_module(f"gammaray.engine.drafters.{MODULES[making.config.method]}")
    drafter: Drafter = module.make(making)
    return drafter

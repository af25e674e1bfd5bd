"""What a drafter is, in a line for `gammaray validate`."""

from __future__ import annotations

from gammaray.config import Config
from gammaray.drafter_config import WEIGHTLESS, CompositeDrafter
from gammaray.engine.drafters.base import Drafter, Featured, Observing
from gammaray.engine.drafters.layer_exit import LayerExitDrafter
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.drafters.recurrent import RecurrentDrafter
from gammaray.engine.runner import ModelRunner

MIB = 2**20


def describe(name: str, config: Config, drafter: Drafter, target: ModelRunner) -> str:
    """Of the drafter that was made for this target from the configuration's entry `name`."""
    own = config.drafters[name]
    if isinstance(drafter, LayerExitDrafter):
        return _layer_exit(drafter, target)
    if isinstance(drafter, ModelDrafter):
        return _model(drafter, target)
    if isinstance(drafter, RecurrentDrafter):
        runner = drafter.runner
        return (
            f"recurrent model of {runner.num_layers} layers, same vocabulary of {runner.vocab_size} tokens; "
            f"{runner.state_bytes / MIB:.3f} MiB of state for each drafted token"
        )
    if isinstance(own, CompositeDrafter):
        return f"the trees of {', '.join(own.drafters)} in one"
    if isinstance(drafter, Featured):
        layers = ", ".join(map(str, drafter.layers))
        return f"continues the target's hidden states behind {layers} of its {target.num_layers} layers"
    if own.method == "lookahead":
        return "proposes n-grams that the target makes up as it goes"
    if isinstance(drafter, Observing):
        return f"proposes what the target thought likely, {drafter.top} tokens behind each"
    assert own.method in WEIGHTLESS
    return "proposes tokens of the context, so every vocabulary fits"


def _model(drafter: ModelDrafter, target: ModelRunner) -> str:
    length = drafter.runner.max_model_len
    short = f"; drafts only up to {length} tokens" if length < target.max_model_len else ""
    return (
        f"model of {drafter.runner.num_layers} layers, same vocabulary of {drafter.vocab_size} tokens{short}"
    )


def _layer_exit(drafter: LayerExitDrafter, target: ModelRunner) -> str:
    use, layers = drafter.kv_use(target), drafter.runner.num_layers
    return (
        f"the first {layers} of the target's {target.num_layers} layers over its own pages: "
        f"{use.own / MIB:.1f} MiB of KV, where a model of as many layers takes {use.as_model / MIB:.1f} MiB"
    )

"""Any Hugging Face causal language model, with its attention handed in through AttentionInterface."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from gammaray.engine.attention import Attention, AttentionOptions
from gammaray.engine.hidden import Taps
from gammaray.errors import ModelUnsupported

ATTENTION_NAME = "gammaray_paged"  # transformers builds no mask for a name that it has no mask function for


class HuggingFaceModel:
    """Implements `gammaray.engine.attention.Model`. Takes the model over: its attention setting changes."""

    def __init__(self, model: PreTrainedModel) -> None:
        model.set_attn_implementation(ATTENTION_NAME)
        if model.config._attn_implementation != ATTENTION_NAME:
            raise ModelUnsupported("its attention does not go through transformers' AttentionInterface")
        self._model = model
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def embeddings(self) -> Tensor:
        return cast(Tensor, self._model.get_input_embeddings().weight).detach()

    def first(self, layers: int, end: PreTrainedModel | None = None) -> HuggingFaceModel:
        """See `gammaray.engine.attention.LayeredModel`."""
        shared = decoder_layers(self._model)[:layers]
        if end is None:
            return HuggingFaceModel(_with_layers(self._model, shared))
        own = decoder_layers(end)
        for index, layer in enumerate(shared):
            own[index] = layer
        end.set_input_embeddings(self._model.get_input_embeddings())
        return HuggingFaceModel(end)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Attention, wanted: Tensor | None
    ) -> Tensor:
        keep: dict[str, Tensor | int] = (
            {} if wanted is None or not self._keeps else {"logits_to_keep": wanted}
        )
        if wanted is not None and not len(wanted):
            keep = {"logits_to_keep": 1} if self._keeps else {}
        logits: Tensor = self._model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            gammaray=attention,
            **keep,
        ).logits[0]
        if wanted is None or (self._keeps and len(wanted)):
            return logits
        return logits[wanted]

    def forward_features(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        wanted: Tensor,
        layers: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """See `gammaray.engine.hidden.FeatureModel`."""
        taps = Taps(layers)
        with _listening(self._model, taps):
            logits = self.forward(input_ids, positions, attention, wanted)
        return logits, taps.features()

    def embed(self, input_ids: Tensor) -> Tensor:
        """See `gammaray.engine.hidden.FeatureModel`."""
        return cast(Tensor, self._model.get_input_embeddings()(input_ids[None])[0])

    def head(self, states: Tensor) -> Tensor:
        """See `gammaray.engine.hidden.FeatureModel`."""
        return cast(Tensor, self._model.get_output_embeddings()(states))

    def head_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `gammaray.engine.hidden.FeatureModel`."""
        head: Any = self._model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return head.weight.detach()[tokens], None if bias is None else bias.detach()[tokens]


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Raises ModelUnsupported when they are not in one list."""
    return cast(nn.ModuleList, model.get_submodule(_place_of_layers(model)))


def _place_of_layers(model: PreTrainedModel) -> str:
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return str(name)
    raise ModelUnsupported(f"no list of {count} layers is in it, so its hidden states are not to be had")


def _with_layers(model: PreTrainedModel, layers: nn.ModuleList) -> PreTrainedModel:
    """The same modules with other layers: what stands above them is copied, and so is the configuration."""
    *above, last = _place_of_layers(model).split(".")
    config = copy.deepcopy(model.config)
    config.get_text_config().num_hidden_layers = len(layers)
    top = parent = _shell(model, config)
    for name in above:
        shell = _shell(getattr(parent, name), config)
        setattr(parent, name, shell)
        parent = shell
    setattr(parent, last, layers)
    return cast(PreTrainedModel, top)


def _shell(module: Any, config: PreTrainedConfig) -> Any:
    """A copy whose children can be exchanged."""
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    if isinstance(own := getattr(module, "config", None), PreTrainedConfig):
        shell.config = config if own.model_type == config.model_type else config.get_text_config()
    return shell


@contextmanager
def _listening(model: PreTrainedModel, taps: Taps) -> Iterator[None]:
    """Hand the taps what enters each layer that they ask for, and what leaves the last one and the norm."""
    layers = decoder_layers(model)

    def entered(index: int, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        taps.see(index, (args[0] if args else kwargs["hidden_states"])[0])

    def left(module: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        taps.see(len(layers), (output[0] if isinstance(output, tuple) else output)[0])

    def normed(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        taps.see(len(layers) + 1, output[0][0])

    with ExitStack() as hooks:
        for index in {*taps.layers} - {len(layers), len(layers) + 1}:
            hook = partial(entered, index)
            hooks.callback(layers[index].register_forward_pre_hook(hook, with_kwargs=True).remove)
        hooks.callback(layers[-1].register_forward_hook(left).remove)
        hooks.callback(model.base_model.register_forward_hook(normed).remove)
        yield


def _attend(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    gammaray: Attention | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its attention; returns [1, T, H, Dv]."""
    if gammaray is None:
        raise ModelUnsupported("it does not hand keyword arguments down to its attention")
    if attention_mask is not None or others.get("position_bias") is not None:
        raise ModelUnsupported("it adds a mask or a position bias of its own to the attention scores")
    if others.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ModelUnsupported("its attention is not causal")
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    layer = module.layer_idx
    assert isinstance(layer, int)
    return gammaray.attend(layer, q, k, v, options)[None], None


AttentionInterface.register(ATTENTION_NAME, _attend)

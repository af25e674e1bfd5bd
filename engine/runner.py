"""The model runner: weights, KV pool, and the forward pass over a packed ragged batch.

Not thread-safe, and torch keeps one OpenMP team per calling thread: call it from one thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from gammaray.engine.attention import (
    DenseAttention,
    LayeredModel,
    Model,
    PagedAttention,
    paged_attention,
)
from gammaray.engine.batch import Row, Step, StepSizes, pack, transfer
from gammaray.engine.graphs import Capture, Graphs
from gammaray.engine.hidden import FeatureModel, of_layers
from gammaray.engine.pool import KVPool
from gammaray.engine.projection import projection
from gammaray.errors import ConfigError
from gammaray.kernels.paths import AttentionSizes


class ModelRunner:
    """Runs one model over its own KV pool. Which block belongs to whom is the caller's business.

    With `sizes` each row of logits, and the KV written, has the same bits in every batch. That was proven
    for the number of threads at the time, so any thread that calls `forward` is set to compute with as many.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...] = (),
        sizes: AttentionSizes | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._sizes = sizes
        self._threads = torch.get_num_threads()
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.block_size = pool.block_size
        self.num_blocks = pool.num_blocks
        self.num_layers = len(pool.layers)
        self.dtype = pool.dtype
        self.device = pool.device
        self._graphs: Graphs | None = None
        self._recorded: tuple[int, ...] = ()  # layers whose hidden states recorded passes give

    def record(self, sizes: Sequence[StepSizes], capture: Capture, layers: Sequence[int] = ()) -> None:
        """From now on steps that fit into one of these sizes are padded and replayed (see `graphs.py`), those
        of `run_features` too where no more than these `layers` are wanted.

        Before anything is served.
        """
        sample = pack([Row([0], 0, [self.num_blocks])], self.block_size)  # in the block that is nobody's

        def forward(step: Step) -> Sequence[Tensor]:
            return self._forward_features(step, layers) if layers else [self._forward(step)]

        self._graphs = Graphs(forward, sizes, sample, self.device, self._pool.nowhere, capture)
        self._recorded = tuple(layers)

    @property
    def padded_tokens(self) -> list[int]:
        """Tokens that steps are padded to, ascending; none: they run as they are."""
        return self._graphs.tokens if self._graphs else []

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Write the rows' KV and return their logits [N, V], rows in the order `Row` describes.

        On a CPU in float32; on a GPU they stay there, in the model's dtype.
        """
        # copied outside inference mode, so that the caller may change them in place
        return self._own(self.run(pack(rows, self.block_size)))

    def forward_features(self, rows: Sequence[Row], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """As `forward`, and the hidden states [T, len(layers) * H] of all tokens fed, in the model's dtype.

        Layer l is the state after l layers: 0 is the embeddings, `num_layers` what the final norm reads, and
        one more what the head reads. Raises ConfigError for a layer that is not there, or a model that does
        not tell.
        """
        self.check_layers(layers)
        logits, features = self.run_features(pack(rows, self.block_size), layers)
        return self._own(logits), features.clone()

    def check_layers(self, layers: Sequence[int]) -> None:
        """Raises ConfigError when `forward_features` cannot tell these."""
        if not all(0 <= layer <= self.num_layers + 1 for layer in layers):
            last = self.num_layers + 1
            raise ConfigError(f"hidden states of layers {list(layers)}: the model has 0 to {last}")
        _ = self.telling

    def first(self, layers: int, end: PreTrainedModel | None = None) -> ModelRunner:
        """Its first layers as a runner, with its final norm and its head, or with those of `end`.

        It reads and writes the same pages, so it needs no KV of its own; what it writes, this runner's own
        pass over these slots writes again. Raises ConfigError for a number of layers that it has not.
        """
        if not 0 < layers < self.num_layers:
            most = self.num_layers - 1
            raise ConfigError(f"layers {layers}: the target has {self.num_layers}, so use 1 to {most}")
        if not isinstance(self._model, LayeredModel):
            raise ConfigError("this form of the model cannot end early: use method: model")
        return ModelRunner(
            self._model.first(layers, end),
            self._pool.first(layers),
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            sizes=self._sizes,
        )

    @property
    def kv_bytes(self) -> int:
        """Of the tensors that its pages are in."""
        return self._pool.nbytes

    def kv_bytes_beside(self, other: ModelRunner) -> int:
        """Of these, what is not memory of the other's pages."""
        return self._pool.bytes_beside(other._pool)

    def projection(self) -> NDArray[np.float16]:
        """What the acceptance predictor reads of each token, [V, 8]."""
        return projection(self._model.embeddings)

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        """The packed form of `forward`: logits [N, V], in the model's dtype, valid until the next call."""
        if self._graphs and (bucket := self._graphs.bucket(step.sizes)):
            return self._graphs.run(step, bucket)[0]
        return self._forward(step.to(self.device))

    @torch.inference_mode()
    def run_features(self, step: Step, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The packed form of `forward_features`."""
        known = {*layers} <= {*self._recorded}
        if self._graphs and known and (bucket := self._graphs.bucket(step.sizes)):
            logits, features = self._graphs.run(step, bucket)
            return logits, of_layers(features, self._recorded, layers)
        return self._forward_features(step.to(self.device), layers)

    @property
    def telling(self) -> FeatureModel:
        """The model, for what continues its hidden states. Raises ConfigError when it does not tell them."""
        if not isinstance(self._model, FeatureModel):
            raise ConfigError(
                "this form of the model does not tell its hidden states: set deterministic: false"
            )
        return self._model

    def wait(self) -> None:
        """Until the device has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _own(self, logits: Tensor) -> Tensor:
        return logits.to(torch.float32 if self.device.type == "cpu" else logits.dtype, copy=True)

    @torch.inference_mode()
    def _forward_features(self, step: Step, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        positions, attention = step.paged.positions, self._attention(step)
        return self.telling.forward_features(step.input_ids, positions, attention, step.wanted, layers)

    @torch.inference_mode()
    def _forward(self, step: Step) -> Tensor:
        return self._model.forward(step.input_ids, step.paged.positions, self._attention(step), step.wanted)

    def _attention(self, step: Step) -> PagedAttention:
        if self._sizes is not None and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        return paged_attention(self._pool, step.paged, self._sizes)

    @torch.inference_mode()
    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy the KV of physical slots `src` to `dst` in all layers; the two may overlap."""
        if src:
            self._pool.move(*transfer(torch.tensor([src, dst]), self.device))

    @torch.inference_mode()
    def dense(self, tokens: Sequence[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """One whole sequence without pages: logits [T, V] float32, and k, v [T, Hkv, D] per layer."""
        attention, ids = DenseAttention(), torch.tensor(tokens, device=self.device)
        positions = torch.arange(len(ids), device=self.device)
        logits = self._model.forward(ids, positions, attention, None)
        return logits.float(), [attention.kv[layer] for layer in range(self.num_layers)]

    @torch.inference_mode()
    def read_kv(self, slots: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Copies of k [N, Hkv, D] and v [N, Hkv, Dv] of N physical slots, per layer."""
        return self._pool.read(torch.tensor(slots, dtype=torch.int64, device=self.device))

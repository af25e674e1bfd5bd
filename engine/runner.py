"""The model runner: weights, KV pool, and the forward pass over a packed ragged batch.

Not thread-safe, and torch keeps one OpenMP team per calling thread: call it from one thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gammaray.engine.attention import DenseAttention, Model, PagedAttention
from gammaray.engine.batch import Row, Step, pack
from gammaray.engine.hidden import FeatureModel
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
        self.device = torch.device("cpu")

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Write the rows' KV and return their logits [N, V], float32, rows in the order `Row` describes."""
        # copied outside inference mode, so that the caller may change them in place
        return self.run(pack(rows, self.block_size)).to(torch.float32, copy=True)

    def forward_features(self, rows: Sequence[Row], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """As `forward`, and the hidden states [N, len(layers) * H] behind those logits, in the model's dtype.

        Layer l is the state after l layers: 0 is the embeddings, `num_layers` what the final norm reads.
        Raises ConfigError for a layer that is not there, or a model that does not tell.
        """
        if not all(0 <= layer <= self.num_layers for layer in layers):
            raise ConfigError(f"hidden states of layers {list(layers)}: the model has 0 to {self.num_layers}")
        logits, features = self.run_features(pack(rows, self.block_size), layers)
        return logits.to(torch.float32, copy=True), features.clone()

    def projection(self) -> NDArray[np.float16]:
        """What the acceptance predictor reads of each token, [V, 8]."""
        return projection(self._model.embeddings)

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        """The packed form of `forward`: logits [N, V], in the model's dtype."""
        return self._model.forward(step.input_ids, step.paged.positions, self._attention(step), step.wanted)

    @torch.inference_mode()
    def run_features(self, step: Step, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The packed form of `forward_features`."""
        if not isinstance(self._model, FeatureModel):
            raise ConfigError(
                "this form of the model does not tell its hidden states: set deterministic: false"
            )
        positions, attention = step.paged.positions, self._attention(step)
        return self._model.forward_features(step.input_ids, positions, attention, step.wanted, layers)

    def _attention(self, step: Step) -> PagedAttention:
        if self._sizes is not None and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        return PagedAttention(self._pool, step.paged, self._sizes)

    @torch.inference_mode()
    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy the KV of physical slots `src` to `dst` in all layers; the two may overlap."""
        if src:
            self._pool.move(torch.tensor(src), torch.tensor(dst))

    @torch.inference_mode()
    def dense(self, tokens: Sequence[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """One whole sequence without pages: logits [T, V] float32, and k, v [T, Hkv, D] per layer."""
        attention = DenseAttention()
        logits = self._model.forward(torch.tensor(tokens), torch.arange(len(tokens)), attention, None)
        return logits.float(), [attention.kv[layer] for layer in range(self.num_layers)]

    @torch.inference_mode()
    def read_kv(self, slots: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Copies of k [N, Hkv, D] and v [N, Hkv, Dv] of N physical slots, per layer."""
        return self._pool.read(torch.tensor(slots, dtype=torch.int64))

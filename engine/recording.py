"""When a model's passes become CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gammaray.engine.graphs import CudaCapture, buckets
from gammaray.engine.runner import ModelRunner
from gammaray.kernels.backend import backend
from gammaray.types import MAX_TREE_NODES

log = logging.getLogger(__name__)


def record_passes(runner: ModelRunner, max_batch: int, token_budget: int, layers: Sequence[int] = ()) -> None:
    """On a GPU steps that decode and verify become CUDA graphs; a model that cannot be captured does without.
    `layers`: whose hidden states somebody wants, which these graphs leave too.

    torch's own attention plans on the CPU, so it cannot be captured either.
    """
    if not launches_kernels(runner):
        return
    blocks = -(-(runner.max_model_len + MAX_TREE_NODES) // runner.block_size)
    try:
        runner.record(buckets(max_batch, token_budget, blocks), CudaCapture(), layers)
    except Exception as error:  # of CUDA, a compiler, or a foreign model
        log.warning("the model's passes cannot be captured, they run as they are: %s", error)


def launches_kernels(runner: ModelRunner) -> bool:
    return runner.device.type == "cuda" and backend(runner.device) == "fused"

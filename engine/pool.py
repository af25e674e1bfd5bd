"""The paged KV pool of one model, and how large it is made."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from gammaray.engine.device import CPU
from gammaray.errors import ConfigError
from gammaray.kernels.api import move_kv

HOST_FRACTION = 0.25  # of the memory that is free at start-up: a CPU serves beside other programs
HOST_LIMIT = 4 * 2**30  # bytes; more concurrency than a CPU can decode
MOST_SEQUENCES = 64  # of full length; small models need no more


@dataclass(frozen=True, slots=True)
class KVShape:
    """One layer's keys and values for one token."""

    kv_heads: int
    k_dim: int
    v_dim: int

    @property
    def elements(self) -> int:
        return self.kv_heads * (self.k_dim + self.v_dim)


class KVPool:
    """Pools [num_blocks, block_size, Hkv, D] per layer. Block b, offset o is slot b * block_size + o.

    Layers of one shape lie in one tensor, so that moves are one call. Nothing is initialised: a CPU's memory
    is taken as blocks are first written, and unwritten slots are never read. One block more than num_blocks
    is there, nobody's: in its slot `nowhere` the tokens that pad a step leave their keys.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.nowhere = num_blocks * block_size
        self._shapes = tuple(shapes)
        # Keys and values, each [L, num_blocks + 1, block_size, Hkv, D].
        self._stacks: list[tuple[Tensor, Tensor]] = []
        layers: dict[int, tuple[Tensor, Tensor]] = {}
        for shape in dict.fromkeys(shapes):
            members = [layer for layer, other in enumerate(shapes) if other == shape]
            try:
                size = len(members), num_blocks + 1, block_size, shape.kv_heads
                k, v = (
                    torch.empty(*size, dim, dtype=dtype, device=device) for dim in (shape.k_dim, shape.v_dim)
                )
            except RuntimeError:
                raise ConfigError(
                    f"no memory for a KV pool of {num_blocks} blocks of {block_size} tokens: lower num_blocks"
                ) from None
            self._stacks.append((k, v))
            layers.update({layer: (k[i], v[i]) for i, layer in enumerate(members)})
        self.layers = [layers[layer] for layer in range(len(shapes))]

    def first(self, layers: int) -> KVPool:
        """The pages of the first layers alone. It is the same memory."""
        part = copy.copy(self)
        part.layers, part._shapes = self.layers[:layers], self._shapes[:layers]
        counts = [part._shapes.count(shape) for shape in dict.fromkeys(self._shapes)]
        pairs = zip(self._stacks, counts, strict=True)
        part._stacks = [(k[:count], v[:count]) for (k, v), count in pairs if count]
        return part

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for pair in self._stacks for x in pair)

    def bytes_beside(self, other: KVPool) -> int:
        """Of its own bytes, those that are not memory of the other's."""
        shared = {x.untyped_storage().data_ptr() for pair in other._stacks for x in pair}
        own = (x for pair in self._stacks for x in pair)
        return sum(x.nbytes for x in own if x.untyped_storage().data_ptr() not in shared)

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Copy slots `src` [N] to `dst` [N] in every layer; they may overlap."""
        for k, v in self._stacks:
            move_kv(k, v, src, dst)

    def read(self, slots: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Copies of k [N, Hkv, D] and v [N, Hkv, Dv] of slots [N], per layer."""
        return [(k.flatten(0, 1)[slots], v.flatten(0, 1)[slots]) for k, v in self.layers]


def bytes_per_block(shapes: Sequence[KVShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes in all layers together."""
    return sum(shape.elements for shape in shapes) * block_size * dtype.itemsize


def usable_memory(device: torch.device = CPU) -> int:
    """Bytes that KV may use, and what runs beside it.

    Of a CPU a quarter of the free memory, at most 4 GiB; of a GPU what is free, within this process's share
    (`torch.cuda.set_per_process_memory_fraction`).
    """
    if device.type == "cpu":
        return int(min(psutil.virtual_memory().available * HOST_FRACTION, HOST_LIMIT))
    torch.cuda.empty_cache()  # what loading and its checks took
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return share_left(free, total, share, torch.cuda.memory_reserved(device))


def share_left(free: int, total: int, share: float, reserved: int) -> int:
    """Bytes of a GPU that a process may still take: it has `reserved` of its `share` of `total`."""
    return max(0, min(free, int(share * total) - reserved))


def default_num_blocks(
    block_bytes: int, block_size: int, max_model_len: int, memory: float = 0.85, usable: int | None = None
) -> int:
    """As many blocks as the share `memory` of the `usable` bytes holds (None: of this CPU's).

    Never more than 64 sequences of full length.

    Raises ConfigError when not even one sequence of full length fits.
    """
    budget = int(memory * (usable_memory() if usable is None else usable))
    per_sequence = -(-max_model_len // block_size)
    blocks = min(budget // block_bytes, MOST_SEQUENCES * per_sequence)
    if blocks < per_sequence:
        raise ConfigError(
            f"the KV of {max_model_len} tokens takes {per_sequence * block_bytes / 2**20:.0f} MiB, more than "
            f"the {budget / 2**20:.0f} MiB set aside: lower max_model_len or set num_blocks"
        )
    return blocks

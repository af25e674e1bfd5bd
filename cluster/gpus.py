"""What a GPU's name says: its NVLink version and its memory. For matrices, which hold names alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from gammaray.cluster.topology import Topology

MIB = 2**20
SHARE = 0.98  # of a size in a name: drivers report 98.6 to 100 % of it
GRACE = re.compile(r"G[BH]\d00")  # sizes in these names are the CPU's: a GH200 480GB has 96 GB on its GPU


@dataclass(frozen=True, slots=True)
class Model:
    """`nvlink` None: it has none, or the name is not known here."""

    nvlink: float | None
    memory: int | None = None  # bytes, as the driver reports it


# words of the name, NVLink version, MiB as nvidia-smi shows them. The first row that fits counts. A model of
# several sizes has its smallest here, for names without a size.
TABLE: tuple[tuple[str, float | None, int], ...] = (
    ("GB300", 5, 284208),
    ("GB200", 5, 189471),
    ("B300", 5, 275040),
    ("B200", 5, 183359),
    ("B100", 5, 183359),
    ("GH200 144G", 4, 145920),
    ("GH200", 4, 97871),
    ("H200", 4, 143771),
    ("H100 NVL", 4, 95830),
    ("H100", 4, 81559),
    ("H800", 4, 81559),
    ("H20", 4, 97871),
    ("A100", 3, 40536),
    ("A800", 3, 40536),
    ("A30", 3, 24258),
    ("A40", 3, 46068),
    ("RTX A6000", 3, 49140),
    ("RTX 3090", 3, 24268),
    ("V100", 2, 16160),
    ("P100", 1, 12198),
    ("T4", None, 15360),
    ("A10", None, 23028),
    ("L4", None, 23034),
    ("L40", None, 46068),
    ("L40S", None, 46068),
    ("RTX 4090", None, 24564),
    ("RTX 5090", None, 32607),
)


def lookup(name: str) -> Model:
    """What is known of the GPU called `name`, e.g. 'NVIDIA A100-SXM4-80GB'."""
    for words, nvlink, mebibytes in TABLE:
        if _has(name, words):
            size = None if GRACE.match(words) else _size(name)
            return Model(nvlink, size or mebibytes * MIB)
    return Model(None, _size(name))


def named(topology: Topology, name: str) -> Topology:
    """The same with GPUs called `name`, and what the name says; memory that was measured stays."""
    model = lookup(name)
    gpus = (
        replace(
            gpu,
            name=name,
            memory=gpu.memory or model.memory,
            nvlink_version=model.nvlink or gpu.nvlink_version,
        )
        for gpu in topology.gpus
    )
    return replace(topology, gpus=tuple(gpus))


def _has(name: str, words: str) -> bool:
    pattern = r"[\s-]+".join(re.escape(word) for word in words.split())
    return re.search(rf"(?<![A-Z0-9]){pattern}(?![0-9A-Z])", name, re.IGNORECASE) is not None


def _size(name: str) -> int | None:
    """Bytes of '80GB' in a name, rounded down to what the driver leaves of it."""
    found = re.search(r"(?<![\w.])(\d{1,5}) ?GB?(?!\w)", name, re.IGNORECASE)
    return int(int(found[1]) * SHARE * 1024) * MIB if found else None

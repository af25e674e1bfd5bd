"""A driver that says what a test wants, under the real nvidia-ml-py: see fake_nvml.c for keys and values."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from gammaray.cluster import saved
from gammaray.cluster.topology import Topology

SOURCE = Path(__file__).with_name("fake_nvml.c")
SWITCH = "00000000:C4:00.0"
GIB = 2**30
Table = dict[str, object]  # key -> 'value' with code 0, or an int: the code
PROBE = """
import json, sys
from pathlib import Path
from gammaray.cluster import nvml, saved
print(json.dumps(saved.dump(nvml.probe("here", Path(sys.argv[1])))))
"""


@dataclass(frozen=True)
class Library:
    """A compiled driver."""

    folder: Path

    def environment(self, table: Table) -> dict[str, str]:
        lines = (
            f"{key}={value}" if isinstance(value, int) else f"{key}=0 {value}" for key, value in table.items()
        )
        (self.folder / "table").write_text("\n".join(lines) + "\n")
        paths = {"LD_LIBRARY_PATH": str(self.folder), "FAKE_NVML": str(self.folder / "table")}
        return {**os.environ, **paths}

    def probe(self, table: Table, numa: Path | None = None) -> Topology:
        """What `nvml.probe` reads in a process of its own: a library cannot be loaded anew."""
        command = [sys.executable, "-c", PROBE, str(numa or self.folder)]
        done = subprocess.run(
            command, env=self.environment(table), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return saved.load(json.loads(done.stdout), "probe")


def compiled(folder: Path, *leave_out: str) -> Library:
    """`leave_out`: OLD_DRIVER, WITHOUT_P2P."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("needs a C compiler for a fake libnvidia-ml.so.1")
    flags = [f"-D{name}" for name in leave_out]
    output = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", output, SOURCE], check=True)
    return Library(folder)


def bus(gpu: int) -> str:
    return f"00000000:{gpu + 0xA:02X}:00.0"


def gpus(count: int, name: str = "NVIDIA H100 80GB HBM3") -> Table:
    """`count` whole GPUs without NVLink, which may all reach each other, across one host bridge."""
    table: Table = {"init 0": "", "count 0": str(count)}
    for gpu in range(count):
        table |= {
            f"handle {gpu}": "",
            f"uuid {gpu}": f"GPU-{gpu:08x}-0000",
            f"name {gpu}": name,
            f"memory {gpu}": str(80 * GIB),
            f"pci {gpu}": bus(gpu),
            f"mig {gpu}": "0",
        }
        for other in range(count):
            if other != gpu:
                table |= {f"p2p {gpu} {other}": "0", f"ancestor {gpu} {other}": "30"}
    return table


def link(gpu: int, number: int, end: str = SWITCH, kind: int = 2, version: int = 6, state: int = 1) -> Table:
    """One NVLink; `kind` 0: the far end is a GPU, 2: a switch; `version` 6: NVLink 4.0."""
    if state != 1:
        return {f"state {gpu} {number}": str(state)}
    return {
        f"state {gpu} {number}": "1",
        f"end {gpu} {number}": end,
        f"type {gpu} {number}": str(kind),
        f"version {gpu} {number}": str(version),
        f"peer {gpu} {number}": "1",
    }


def switched(count: int, links: int, version: int = 6, name: str = "NVIDIA H100 80GB HBM3") -> Table:
    """GPUs with `links` NVLinks each to switches, and a healthy fabric on this node alone."""
    table = gpus(count, name)
    for gpu in range(count):
        table[f"fabric {gpu}"] = fabric()
        for number in range(links):
            table |= link(gpu, number, version=version)
    return table


def fabric(
    state: int = 3, status: int = 0, cluster: int = 0, clique: int = 0, mask: int = 0, summary: int = 1
) -> str:
    return f"3 {state} {status} {cluster} {clique} {mask} {summary}"

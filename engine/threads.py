"""How many threads an engine should compute with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

SPIN = "5000"  # iterations of a waiting loop: tens of microseconds, the gap between two operators
FAST_CORES = ("sysctl", "-n", "hw.perflevel0.physicalcpu")  # fails on Intel
CGROUP = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: "<quota> <period>" in microseconds, or "max <period>"


def usable_cores() -> int:
    """Physical cores of this machine that this process may use: at least 1.

    A second thread on a core, or more threads than the container's quota pays for, makes each matrix
    product wait for its slowest part.
    """
    affinity = psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else None
    physical = fast_cores() or psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return max(1, min(physical, len(affinity or range(physical)), quota(CGROUP) or physical))


def fast_cores() -> int | None:
    """The performance cores of an Apple chip, which torch counts too; None elsewhere."""
    if sys.platform != "darwin":
        return None
    try:
        found = subprocess.run(FAST_CORES, capture_output=True, text=True, check=True).stdout
        return int(found)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def quota(file: Path) -> int | None:
    """Whole cores that the cgroup grants; None without a limit."""
    try:
        granted, period = file.read_text().split()
        return max(1, int(granted) // int(period))
    except (OSError, ValueError):
        return None


def asked_threads() -> int | None:
    """What the user's OMP_NUM_THREADS says."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) > 0 else None


def compute_with(threads: int) -> None:
    """Sets the size of OpenMP's pool and, unless the user has, how long its threads spin.

    Only counts before torch is imported in this process. With the default spin (about a millisecond) a
    thread that waits for one that lost its core burns the other core too: on two busy cores decoding
    slows down 20 times. A short spin keeps the speed of an idle machine and most of it on a busy one.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)

"""What a pod runs: `python -m gammaray.cluster.pod` becomes the `ray start` that KubeRay made, with labels.

The operator puts its command into KUBERAY_GEN_RAY_START_CMD where a pod has the annotation
`ray.io/overwrite-container-cmd: "true"` (https://docs.ray.io, "Specify container commands for Ray head/worker
Pods"). The process becomes Ray instead of starting it, so that signals reach it.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from typing import NoReturn

from gammaray.cluster import nvml, show
from gammaray.cluster.labels import as_flag, flag, labelled, labels
from gammaray.cluster.topology import Topology
from gammaray.cluster.visible import visible
from gammaray.errors import ConfigError, GammarayError

COMMAND = "KUBERAY_GEN_RAY_START_CMD"
OPEN_FILES = "RAY_START_ULIMIT_OPEN_FILES"  # the operator's own variable; its default is 65536


def main() -> NoReturn:
    """Exit code 2 when the pod is not as it should be, 1 when its GPUs are not there; else Ray's."""
    try:
        words = command(nvml.probe(), os.environ)
        _allow_open_files(os.environ.get(OPEN_FILES) or "65536")
        sys.stdout.flush()
        os.execvp(words[0], words)
    except FileNotFoundError:
        raise SystemExit("gammaray: there is no command 'ray' in this image: use one of gammaray's") from None
    except GammarayError as error:
        print(f"gammaray: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def command(topology: Topology, environ: Mapping[str, str]) -> list[str]:
    """The words to run. Says on standard output what was found, for `kubectl logs`.

    Raises ConfigError when the operator gave no command, or one that is not `ray start`, and GammarayError
    when it names GPUs and none can be used: the model would be served from the CPU.
    """
    if not environ.get(COMMAND):
        raise ConfigError(
            f"{COMMAND} is not set: run this as the command of a pod that KubeRay makes, with the annotation "
            'ray.io/overwrite-container-cmd: "true"'
        )
    own = labels(topology, environ)
    words = labelled(environ[COMMAND], own, environ)
    seen = visible(topology, environ)
    print(show.as_text([seen], 0.0), f"labels: {as_flag(own)}", sep="\n")
    asked = flag(words, "--num-gpus") or "0"
    if asked != "0" and not seen.gpus:
        reason = "; ".join(seen.notes) or "CUDA_VISIBLE_DEVICES hides them"
        raise GammarayError(f"this pod has {asked} GPUs for Ray, but {reason}")
    return words


def _allow_open_files(wanted: str) -> None:
    """As `ulimit -n` in the operator's own command, but up to the hard limit, which only root may raise.

    Raises ConfigError when `wanted` is no number.
    """
    if not wanted.isdecimal():
        raise ConfigError(f"{OPEN_FILES}: expected a number of files, got {wanted!r}")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = int(wanted) if hard == resource.RLIM_INFINITY else min(int(wanted), hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


if __name__ == "__main__":
    main()

"""The labels of a Ray node, from its environment and its GPUs, and a `ray start` command that has them.

On Kubernetes nobody chooses the NVLink island that a pod's GPUs are of, so only the pod itself can tell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from gammaray.actors.labels import ISLAND, NODE, POOL
from gammaray.cluster.topology import Topology, islands
from gammaray.cluster.visible import visible
from gammaray.errors import ConfigError

VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")  # of a label, Kubernetes' and Ray's rule
FLAG = "--labels"
OPERATORS = frozenset(";&|<>")  # of a shell, between commands
UUID_LETTERS = 12  # 'GPU-' and eight more


def labels(topology: Topology, environ: Mapping[str, str]) -> dict[str, str]:
    """Of the node whose GPUs are `topology` and whose environment is `environ`.

    `GAMMARAY_POOL`: its pool. `GAMMARAY_NODE`, else `POD_NAME`, else the topology's name: its own. It has an
    island when healthy NVLinks of any known version join all its GPUs, two at least, perhaps through one
    another. Raises ConfigError for what cannot be a label.
    """
    name = environ.get("GAMMARAY_NODE") or environ.get("POD_NAME") or topology.node
    found = {POOL: environ.get("GAMMARAY_POOL"), NODE: name, ISLAND: _island(visible(topology, environ))}
    return {key: _checked(key, value) for key, value in found.items() if value}


def as_flag(found: Mapping[str, str]) -> str:
    """What `ray start --labels` takes."""
    return ",".join(f"{key}={value}" for key, value in sorted(found.items()))


def labelled(command: str, own: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """The words of a `ray start` command with the labels `own` beside those that it has; `own` come first.

    As in the shell that would have run it, variables of `environ` are filled in. Raises ConfigError when it
    is no such command, or more than one.
    """
    words = _words(command, environ)
    if words[:2] != ["ray", "start"] or any(set(word) <= OPERATORS for word in words if word):
        raise ConfigError(f"KUBERAY_GEN_RAY_START_CMD: expected 'ray start ...' alone, got {command!r}")
    rest, given = _without_labels(words)
    every = {**given, **own}
    return [*rest, f"{FLAG}={as_flag(every)}"] if every else rest


def flag(words: Sequence[str], name: str) -> str | None:
    """The value of `name` in a command, which may follow '=' or be the next word; None: not there."""
    for word, following in zip(words, [*words[1:], None], strict=True):
        key, equals, value = word.partition("=")
        if key == name:
            return value if equals else following
    return None


def _island(topology: Topology) -> str | None:
    """Unlike that of any other pod, but for those on one NVLink fabric that reaches several nodes."""
    if len(topology.gpus) < 2 or len(islands(topology, 0.0)) != 1:
        return None
    cliques = {gpu.clique for gpu in topology.gpus}
    if len(cliques) == 1 and (clique := cliques.pop()):
        return f"{clique[0]}.{clique[1]}"  # as NVIDIA's label of nodes, nvidia.com/gpu.clique
    first = min(gpu.uuid for gpu in topology.gpus)
    return first[:UUID_LETTERS] if first.startswith("GPU-") else first.replace(":", "-")


def _checked(key: str, value: str) -> str:
    if not VALUE.fullmatch(value):
        source = {POOL: "GAMMARAY_POOL", NODE: "GAMMARAY_NODE"}.get(key, "the driver")
        raise ConfigError(
            f"{value!r} cannot be the label {key}: set {source} to at most 63 letters, digits, '-', '_' or "
            "'.', with a letter or digit at both ends"
        )
    return value


def _words(command: str, environ: Mapping[str, str]) -> list[str]:
    def value(match: re.Match[str]) -> str:
        return environ.get(match[1] or match[2], "")

    lexer = shlex.shlex(command, posix=True, punctuation_chars="".join(OPERATORS))
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return [re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, word) for word in lexer]
    except ValueError as error:
        raise ConfigError(f"KUBERAY_GEN_RAY_START_CMD cannot be read: {error}: {command!r}") from None


def _without_labels(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    rest: list[str] = []
    given: list[str] = []
    following = iter(words)
    for word in following:
        key, equals, value = word.partition("=")
        if key == FLAG:
            given += (value if equals else next(following, "")).strip('"').split(",")
        else:
            rest.append(word)
    pairs = (pair.partition("=") for pair in given if pair)
    return rest, {key.strip(): value.strip() for key, _, value in pairs}

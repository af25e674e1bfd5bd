"""NVML as it is asked here: an error of one call becomes a note, and nothing else is lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# nvmlNvlinkVersion_t, which pynvml 12 lacks
VERSIONS = {1: 1.0, 2: 2.0, 3: 2.2, 4: 3.0, 5: 3.1, 6: 4.0, 7: 5.0, 8: 6.0}


@dataclass(frozen=True, slots=True)
class Driver:
    """`nvml` is the module pynvml, started."""

    nvml: Any
    notes: list[str] = field(default_factory=list)

    def ask(self, what: str, call: str, *arguments: object) -> Any | None:
        """The answer of `call`; None, and a note about `what`, when it fails."""
        answer = self.answer(call, *arguments)
        if isinstance(answer, Exception):
            self.note(what, call, answer)
            return None
        return answer

    def ask_if_supported(self, what: str, call: str, *arguments: object) -> Any | None:
        """The same, without a note when this GPU or driver just has no such thing."""
        answer = self.answer(call, *arguments)
        if isinstance(answer, Exception):
            if not self.is_(answer, "NOT_SUPPORTED", "INVALID_ARGUMENT", "NOT_FOUND", "FUNCTION_NOT_FOUND"):
                self.note(what, call, answer)
            return None
        return answer

    def answer(self, call: str, *arguments: object) -> Any:
        """The answer of `call`, or its NVMLError as a value."""
        function = getattr(self.nvml, call, None)
        if function is None:  # an old nvidia-ml-py
            return self.nvml.NVMLError(self.nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        try:
            return function(*arguments)
        except self.nvml.NVMLError as error:
            return error

    def is_(self, error: Any, *names: str) -> bool:
        return error.value in {getattr(self.nvml, f"NVML_ERROR_{name}", None) for name in names}

    def note(self, what: str, call: str, error: Exception) -> None:
        """Once, however many links or GPUs say so."""
        text = f"{what}: {call.removeprefix('nvmlDevice')}: {error}"
        if text not in self.notes:
            self.notes.append(text)

    def constant(self, name: str) -> int:
        """Of pynvml, where NVML_P2P_CAPS_INDEX_READ, for one, is the tuple (0,)."""
        value = getattr(self.nvml, name)
        return int(value[0]) if isinstance(value, tuple) else int(value)

    def nvlink_version(self, code: int | None) -> float | None:
        """The number of a version that NVML writes as an enum. None: an unknown code."""
        names = (re.fullmatch(r"NVML_NVLINK_VERSION_(\d+)_(\d+)", name) for name in dir(self.nvml))
        newer = {self.constant(name[0]): float(f"{name[1]}.{name[2]}") for name in names if name}
        return (VERSIONS | newer).get(code) if code is not None else None


def bits(words: Sequence[int]) -> set[int]:
    """Positions of the ones in an array of 64-bit words, as NVML returns sets of CPUs and NUMA nodes."""
    return {64 * n + bit for n, word in enumerate(words) for bit in range(64) if word >> bit & 1}

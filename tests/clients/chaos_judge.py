"""What a disturbed stream has to be, given the undisturbed one."""

from __future__ import annotations

from chaos_requests import Trouble
from chaos_stream import Choice, Heard

TOLERANCE = 1e-3  # of a log-probability: sums in float32 depend on the shape of the batch
TIMEOUT = ("timeout_error", "timeout", "timeout")


def verdict(trouble: Trouble, heard: Heard, undisturbed: Heard) -> tuple[str, str | None]:
    """What became of it, and what is wrong with that."""
    if heard.fault:
        return "failed", heard.fault
    if heard.left:
        return _early("left", heard), _no_beginning(heard, undisturbed)
    if heard.error:
        return _with_error(trouble, heard, undisturbed)
    if not heard.done:
        return "failed", "the stream ended without [DONE]"
    return ("different", fault) if (fault := difference(heard, undisturbed)) else ("same", None)


def _with_error(trouble: Trouble, heard: Heard, undisturbed: Heard) -> tuple[str, str | None]:
    assert heard.error is not None
    kind = tuple(heard.error[key] for key in ("type", "code", "param"))
    if trouble.timeout_s is None or kind != TIMEOUT or heard.status not in (200, 408):
        return "failed", f"status {heard.status}, {heard.error}"
    if (heard.status == 408) == bool(heard.choices):
        return "failed", f"status {heard.status} after {len(heard.choices)} choices had begun"
    return _early("timed out", heard), _no_beginning(heard, undisturbed)


def _early(end: str, heard: Heard) -> str:
    return f"{end} {'midway' if heard.choices else 'before the first event'}"


def difference(heard: Heard, undisturbed: Heard) -> str | None:
    """Where the two answers differ."""
    if heard.choices.keys() != undisturbed.choices.keys():
        return "other choices"
    if _counts(heard) != _counts(undisturbed):
        return f"usage {_counts(heard)}, undisturbed {_counts(undisturbed)}"
    faults = (_unlike(choice, undisturbed.choices[index]) for index, choice in heard.choices.items())
    return next((fault for fault in faults if fault), None)


def _counts(heard: Heard) -> dict[str, int]:
    """Without what the prefix cache had, which depends on what came before."""
    return {name: count for name, count in (heard.usage or {}).items() if name != "prompt_tokens_details"}


def _unlike(choice: Choice, other: Choice) -> str | None:
    for name in ("text", "finish", "tokens", "offsets"):
        if (one := getattr(choice, name)) != (two := getattr(other, name)):
            return f"{name} {one!r}, undisturbed {two!r}"
    if len(choice.numbers) != len(other.numbers):
        return f"{len(choice.numbers)} log-probabilities, undisturbed {len(other.numbers)}"
    apart = max((abs(a - b) for a, b in zip(choice.numbers, other.numbers, strict=True)), default=0.0)
    return f"log-probabilities {apart:.2g} apart" if apart > TOLERANCE else None


def _no_beginning(heard: Heard, undisturbed: Heard) -> str | None:
    """What came of an answer that was cut off must be how the whole one begins."""
    for index, choice in heard.choices.items():
        whole = undisturbed.choices[index]
        if not whole.text.startswith(choice.text) or whole.tokens[: len(choice.tokens)] != choice.tokens:
            return f"began with {choice.text!r}, undisturbed {whole.text!r}"
    return None

"""From token ids to delivered text: prefix-safe detokenisation, stop strings, held-back tails.

A token is delivered when its text is final: no UTF-8 character is incomplete and the end of the text
cannot be the beginning of a stop string. Ids and text always leave together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes of a UTF-8 character, so at most as many byte tokens


class TextDecoder(Protocol):
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out; incomplete UTF-8 ends in U+FFFD."""


class OutputText:
    """The generated part of one sequence.

    push() takes tokens one at a time and says whether a stop string is complete; take() gives what may
    be delivered by now.
    """

    def __init__(self, decoder: TextDecoder, stop: Sequence[str] = ()) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._ends: list[int] = []  # text length after each token
        self._text = ""
        self._window = 0  # ids before it no longer change how later ids decode
        self._settled = 0  # ids whose text is final
        self._taken = 0  # ids delivered
        self.stopped = False

    def push(self, token: int) -> bool:
        """Add a token; True when it completes a stop string. The text then ends before that string,
        and so do the ids: a token stays if any of its text does."""
        self._ids.append(token)
        self._ends.append(len(self._text))
        before = len(self._text)
        self._settle()
        cut = self._stop_found(before)
        if cut is not None:
            self._cut(cut)
        return self.stopped

    def end(self, token: int) -> None:
        """Add an end-of-sequence token, which has no text."""
        self._ids.append(token)
        self._ends.append(len(self._text))

    def take(self, final: bool) -> tuple[list[int], str]:
        """Ids and text not delivered yet. `final`: nothing follows, so held-back text is released too;
        the bytes of a character that never became whole have no text."""
        if final or self.stopped:
            last = len(self._ids)
        else:
            limit = len(self._text) - self._held_back()
            last = self._taken
            while last < self._settled and self._ends[last] <= limit:
                last += 1
        ids = self._ids[self._taken : last]
        start, end = self._end_of(self._taken), self._end_of(last)
        self._taken = last
        return ids, self._text[start:end]

    def resume(self, delivered: Sequence[int]) -> None:
        """Start behind tokens that the client has already."""
        for token in delivered:
            self.push(token)
        self._taken = len(self._ids)

    def _settle(self) -> None:
        """Decode the ids behind the window: text is the difference to what the settled ones gave, since
        tokenizers add or drop spaces by context."""
        settled = self._decoder.decode(self._ids[self._window : self._settled])
        whole = self._decoder.decode(self._ids[self._window :])
        open_ids = len(self._ids) - self._settled
        if whole.endswith(REPLACEMENT) and open_ids < _LONGEST_CHARACTER:
            return
        self._text += whole[len(settled) :]
        self._ends[-1] = len(self._text)
        self._window, self._settled = self._settled, len(self._ids)

    def _stop_found(self, before: int) -> int | None:
        """Where the first stop string begins that was completed by text behind `before`."""
        found = (self._text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop)
        return min((at for at in found if at >= 0), default=None)

    def _cut(self, at: int) -> None:
        self.stopped = True
        self._text = self._text[:at]
        while len(self._ids) > self._taken and self._end_of(len(self._ids) - 1) >= at:
            self._ids.pop()
            self._ends.pop()
        if self._ends:
            self._ends[-1] = len(self._text)

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        tails = range(min(longest, len(self._text)), 0, -1)
        return next((n for n in tails if any(s.startswith(self._text[-n:]) for s in self._stop)), 0)

    def _end_of(self, count: int) -> int:
        return self._ends[count - 1] if count else 0

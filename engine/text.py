"""From token ids to delivered text: prefix-safe detokenisation, stop strings, held-back tails.

A token is delivered when its text is final: no UTF-8 character is incomplete and the end of the text
cannot be the beginning of a stop string. Ids and text always leave together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MOST_OPEN = 3  # tokens, of a byte at least, that a UTF-8 character can be short of its last
MOST_SILENT = 64  # ids without text that are decoded again with each new one
PROMPT_TAIL = 8  # tokens of the prompt that the first ids are decoded behind


class TextDecoder(Protocol):
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out; incomplete UTF-8 ends in U+FFFD."""


class OutputText:
    """The generated part of one sequence.

    push() takes tokens one at a time and says whether a stop string is complete; take() gives what may
    be delivered by now.
    """

    def __init__(
        self,
        decoder: TextDecoder,
        stop: Sequence[str] = (),
        prompt: Sequence[int] = (),
        min_tokens: int = 0,  # a stop string that these complete does not count
    ) -> None:
        self._decoder = decoder
        self._before = list(prompt[-PROMPT_TAIL:])
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._ends: list[int] = []  # text length after each token
        self._text = ""
        self._window = 0  # decoding starts here: what comes before no longer matters to later ids
        self._settled = 0  # ids whose text is final
        self._whole = 0  # length of the text that open ids have, short of an incomplete character
        self._stalled = 0  # open ids since that text last grew
        self._taken = 0  # ids delivered
        self.stopped = False

    def push(self, token: int) -> bool:
        """Add a token; True when it completes a stop string. The text then ends before that string,
        and so do the ids: a token stays if any of its text does."""
        self._ids.append(token)
        self._ends.append(len(self._text))
        before = len(self._text)
        self._settle()
        self._stop_behind(before)
        return self.stopped

    def end(self, token: int) -> None:
        """Add an end-of-sequence token, which has no text."""
        self._close()
        if not self.stopped:
            self._ids.append(token)
            self._ends.append(len(self._text))
            self._settled += 1

    def take(self, final: bool) -> tuple[list[int], str]:
        """Ids and text not delivered yet. `final`: nothing follows, so held-back text is released too;
        the bytes of a character that never became whole have no text."""
        if final and not self.stopped:
            self._close()
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

    def skip(self) -> int:
        """Take what was pushed so far as delivered; returns how many tokens that is."""
        self._taken = len(self._ids)
        return self._taken

    def _settle(self) -> None:
        """Make text of the open ids once they end with a whole character, or with bytes that cannot become
        one. Text is the difference to what the ids before gave, since tokenizers add or drop spaces by
        context."""
        count = len(self._ids)
        text = self._open_text(count)
        whole = text.rstrip(REPLACEMENT)
        if whole == text:
            self._settle_to(count, text)
            return
        self._stalled = 1 if len(whole) > self._whole else self._stalled + 1
        self._whole = len(whole)
        if self._stalled > MOST_OPEN:
            self._settle_to(count - MOST_OPEN, self._open_text(count - MOST_OPEN))

    def _settle_to(self, count: int, text: str) -> None:
        """Make `text` final for the open ids up to `count`, which end, leave and are cut together."""
        # Behind a window of special tokens alone the next id would decode as the first of a text.
        if text or count - self._window > MOST_SILENT:
            self._window = self._settled
        self._text += text
        self._ends[self._settled :] = [len(self._text)] * (len(self._ids) - self._settled)
        self._settled, self._whole, self._stalled = count, 0, 0

    def _close(self) -> None:
        """Nothing will complete what the open ids began: keep the whole characters before it."""
        count = len(self._ids)
        if self._settled < count:
            before = len(self._text)
            self._settle_to(count, self._open_text(count).rstrip(REPLACEMENT))
            self._stop_behind(before)

    def _open_text(self, count: int) -> str:
        """Text that the ids from the settled ones to `count` add."""
        before = [] if self._window else self._before
        settled = self._decoder.decode(before + self._ids[self._window : self._settled])
        return self._decoder.decode(before + self._ids[self._window : count])[len(settled) :]

    def _stop_behind(self, before: int) -> None:
        """Cut at the first stop string that was completed by text behind `before`.

        What stays depends on the text alone, not on how many tokens a round gave: ids that end by the cut,
        and those whose text it divides.
        """
        if len(self._ids) <= self._min_tokens:
            return
        found = (self._text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop)
        cut = min((at for at in found if at >= 0), default=None)
        if cut is None:
            return
        self.stopped = True
        self._text = self._text[:cut]
        keep = bisect_right(self._ends, cut)
        if self._end_of(keep) < cut:
            keep = bisect_right(self._ends, self._ends[keep])
        del self._ids[keep:], self._ends[keep:]
        self._ends = [min(end, cut) for end in self._ends]

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        tails = range(min(longest, len(self._text)), 0, -1)
        return next((n for n in tails if any(s.startswith(self._text[-n:]) for s in self._stop)), 0)

    def _end_of(self, count: int) -> int:
        return self._ends[count - 1] if count else 0

"""What a target is asked before it answers: its own questions, which need no data, or those of a file.

A chat model that is fed its template up to where a user's turn begins goes on as a user, since that is what
it was tuned to see there (Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from gammaray.engine.bench.dataset import Prompt
from gammaray.engine.bench.measure import encode
from gammaray.engine.local import chat_ids
from gammaray.errors import ConfigError, InvalidRequest
from gammaray.training.openings import draw, opening
from gammaray.training.writer import Ids, Writer
from gammaray.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACE = "gammaray-turn"  # stands for a user's turn while a template is looked at
QUESTION_TOKENS = 128
LIKELY = 0.05  # min_p (arXiv 2407.01082) of questions: nothing is learned from these, so they may make sense
FEWEST_LETTERS = 8  # that a question has behind its opening
NOT_TEXT = "\ufffd"


class Source(Protocol):
    """Prompts by their number; the same number, the same prompt."""

    @property
    def size(self) -> int | None:
        """How many there are; None: as many as one likes."""

    def asks(self, numbers: range) -> Mapping[int, Ids]:
        """Token ids up to where an answer begins. Those that came to nothing are missing."""


@dataclass(frozen=True, slots=True)
class Given:
    """The prompts of a file (`gammaray.engine.bench.dataset.read`)."""

    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]

    @property
    def size(self) -> int:
        return len(self.prompts)

    def asks(self, numbers: range) -> Mapping[int, Ids]:
        """A conversation that the template refuses is left out."""
        found = {}
        for number in numbers:
            try:
                found[number] = encode(self.tokenizer, self.prompts[number])
            except InvalidRequest:
                continue
        return found


@dataclass(frozen=True)
class Own:
    """Questions that the target writes itself; without a chat template, the beginnings of texts."""

    writer: Writer
    seed: int = 0
    temperature: float = 1.0
    size: int | None = None

    @cached_property
    def frame(self) -> Frame | None:
        tokenizer = self.writer.tokenizer
        return Frame.of(tokenizer) if tokenizer.chat_template else None

    def asks(self, numbers: range) -> Mapping[int, Ids]:
        """Raises EngineFailure."""
        tokenizer, frame = self.writer.tokenizer, self.frame
        openings = {number: opening(self.seed, number) for number in numbers}
        if frame is None:
            return {number: _beginning(tokenizer, text) for number, text in openings.items()}
        written = self.writer.write(
            {
                number: (frame.begun(tokenizer, text), self._sampling(number, frame.ends))
                for number, text in openings.items()
            }
        )
        return {
            number: chat_ids(tokenizer, [{"role": "user", "content": (first + text).strip()}])
            for number, first in openings.items()
            if is_question(first, text := written[number].text)
        }

    def _sampling(self, number: int, ends: Ids) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            min_p=LIKELY,
            seed=draw(self.seed, number, "question"),
            max_tokens=QUESTION_TOKENS,
            stop_token_ids=ends,
        )


@dataclass(frozen=True, slots=True)
class Frame:
    """What a chat template puts around a user's turn."""

    before: str
    ends: Ids  # the token that the turn ends with, or none

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Frame:
        """Raises ConfigError for a template in which a turn has no such place."""
        turn = [{"role": "user", "content": PLACE}]
        try:
            text = tokenizer.apply_chat_template(turn, add_generation_prompt=False, tokenize=False)
            before, behind = str(text).split(PLACE)
        except Exception as error:  # a template raises what it likes
            raise ConfigError(
                f"the chat template has no place to begin a question ({error}): give prompts in a file"
            ) from error
        ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
        special = [token for token in ids if token in tokenizer.all_special_ids]
        return cls(before, tuple((special or ids)[:1]))

    def begun(self, tokenizer: PreTrainedTokenizerBase, first: str) -> Ids:
        """The template up to where the target goes on with a user's turn."""
        return tuple(tokenizer(self.before + first, add_special_tokens=False)["input_ids"])


def is_question(first: str, text: str) -> bool:
    """Whether the opening `first` and the text behind it ask something: whole characters, enough letters."""
    letters = sum(letter.isalpha() for letter in text)
    return NOT_TEXT not in text and (letters >= FEWEST_LETTERS or first.endswith("."))


def _beginning(tokenizer: PreTrainedTokenizerBase, first: str) -> Ids:
    """What a model that was never tuned to chat goes on from."""
    ends = tokenizer.eos_token_id
    begins = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else ends
    given = tokenizer(first, add_special_tokens=False)["input_ids"] if first else []
    return tuple(([] if begins is None else [begins]) + given)

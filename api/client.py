"""What the HTTP side asks of the rooms behind it, wherever they run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from gammaray.config import Limits
from gammaray.types import Asked, GenerateRequest, Health, ModelInfo, Planned, TokenChunk


class EngineClient(Protocol):
    """Raises members of `gammaray.errors` only."""

    async def info(self) -> ModelInfo:
        """The model behind this client; Overloaded while none answers."""
        ...

    async def health(self) -> Health:
        """How the engine of one replica is; Overloaded while none answers."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """One chunk per round and sequence. Closing the generator aborts the request in the engine."""
        ...


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts and answers need."""

    bos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens that the checkpoint puts around a text."""
        ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        ...

    def convert_ids_to_tokens(self, ids: int, /) -> str | None:
        """The name of one token in the vocabulary."""
        ...

    def get_vocab(self) -> Mapping[str, int]:
        """Every name and its token id."""
        ...

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, str]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        sanitize_control_tokens: bool,
        return_dict: bool,
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        `sanitize_control_tokens`: text of the conversation that spells a control token stays text.
        """
        ...


class Planner(Protocol):
    """Decides how a request speculates."""

    def open(self, asked: Asked) -> AbstractContextManager[Planned]:
        """The plan of a request, which is open until its whole answer was sent. Raises InvalidRequest."""
        ...

    def limits(self, tenant: str) -> Limits:
        """Those that hold now. Unauthorized when the tenant is gone."""
        ...

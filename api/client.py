"""What the HTTP side asks of the rooms behind it, wherever they run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from gammaray.types import GenerateRequest, ModelInfo, SpeculationPlan, TokenChunk


class EngineClient(Protocol):
    """Raises members of `gammaray.errors` only."""

    async def info(self) -> ModelInfo:
        """The model behind this client; Overloaded while none answers."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """One chunk per round and sequence. Closing the generator aborts the request in the engine."""
        ...


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    bos_token_id: int | None

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the checkpoint puts around a text."""
        ...

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, str]],
        *,
        add_generation_prompt: bool,
        return_dict: bool,
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer."""
        ...


class Planner(Protocol):
    """Decides how a request speculates."""

    def __call__(
        self,
        *,
        seeded: bool,
        enabled: bool | None,
        drafter: str | None,
        gamma: int | None,
        width: int | None,
    ) -> tuple[SpeculationPlan, tuple[str, ...]]:
        """The plan for what a request asks (None: nothing), and what was cut back; InvalidRequest.

        `seeded`: the client gave a seed.
        """
        ...

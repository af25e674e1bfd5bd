"""What the README promises: `gammaray serve` answers OpenAI's own client with the embedded model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from openai import BadRequestError, OpenAI
from support.embedded import MODEL, needs_embedded
from support.serving import free_port

pytestmark = [
    pytest.mark.ray,
    pytest.mark.smollm2,
    needs_embedded,
]
TEXT = (
    "The harbour of Lindau lies on the eastern shore of Lake Constance. Its entrance is framed by a lion of "
    "Bavarian stone and a white lighthouse, both built in 1856. Ferries leave every hour in summer."
)
ASK = [{"role": "user", "content": "Write the words red, green and blue three times."}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A server in a process of its own, as a user starts it; must stop cleanly at the end.

    The default configuration in float32: in bfloat16 a prompt in the prefix cache may round otherwise.
    """
    gammaray = [sys.executable, "-m", "gammaray.cli", "serve"]
    default = subprocess.run([*gammaray, "--print-config"], capture_output=True, text=True, check=True).stdout
    file = tmp_path_factory.mktemp("config") / "config.yaml"
    file.write_text(default.replace("dtype: auto", "dtype: float32"))
    port = free_port()
    command = [*gammaray, str(file), "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(f"ready: {MODEL} (float32) at http://127.0.0.1:{port} ")
    yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_it_chats_and_repeats_a_seed_whether_it_speculates_or_not(client: OpenAI) -> None:
    def answer(**speculation: object) -> str | None:
        reply = client.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=30, seed=7, extra_body={"speculation": speculation}
        )
        return reply.choices[0].message.content

    first = answer()
    assert first
    assert answer() == answer(enabled=False) == answer(gamma=2) == first


def test_a_stream_is_the_whole_and_has_several_tokens_in_an_event(client: OpenAI) -> None:
    copy = [
        {"role": "user", "content": f"Correct the spelling of this text and write it out again:\n\n{TEXT}"}
    ]
    settings = {"model": MODEL, "messages": copy, "max_tokens": 60, "temperature": 0}
    whole = client.chat.completions.create(**settings)
    events = list(
        client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(choice.delta.content or "" for event in events for choice in event.choices)
    assert text == whole.choices[0].message.content
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert events[-1].usage.prompt_tokens_details.cached_tokens > 0  # the first request left its prompt
    figures = events[-1].model_extra["metrics"]["speculative_decoding"]
    assert figures["drafter"] == "lookup"
    assert figures["accepted"] > 0
    assert len(events) < whole.usage.completion_tokens


def test_two_choices_and_a_stop_string(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=20, n=2, seed=3, temperature=1
    )
    assert len({choice.message.content for choice in reply.choices}) == 2
    stopped = client.completions.create(
        model=MODEL, prompt="one two three one two three one", temperature=0, max_tokens=20, stop=" three"
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert "three" not in stopped.choices[0].text


def test_what_is_wrong_is_named(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=9)
    assert caught.value.body["param"] == "temperature"

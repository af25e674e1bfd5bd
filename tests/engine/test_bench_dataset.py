"""Data sets of `gammaray bench engine`: three forms, a fair choice, and words about what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gammaray.engine.bench.dataset import Prompt, built_in, read, spread
from gammaray.errors import ConfigError

SPEC = {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": ["x"]}
SHARE = {
    "id": "a1",
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "gpt", "value": "Hello."},
        {"from": "human", "value": "Why?"},
        {"from": "gpt", "value": "So."},
        {"from": "human", "value": "Really?"},
    ],
}
CHAT = {
    "custom_id": "b1",
    "method": "POST",
    "body": {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
}
PARTS = {
    "custom_id": "b2",
    "body": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
}
TEXT = {"custom_id": "b3", "body": {"prompt": "Once"}}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def written(folder: Path, *lines: object) -> Path:
    file = folder / "data.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


def test_each_form_is_read_as_the_model_is_to_be_asked(tmp_path: Path) -> None:
    """A second turn would need an answer to the first; an answer in the file is not the model's."""
    found = read(written(tmp_path, SPEC, "", SHARE, CHAT, PARTS, TEXT))
    assert found == [
        Prompt("81", "writing", (user("Write."),)),
        Prompt("a1", "sharegpt", ({"role": "system", "content": "Be brief."}, user("Why?"))),
        Prompt("b1", "batch", (user("Hi"),)),
        Prompt("b2", "batch", (user("Hi"),)),
        Prompt("b3", "batch", "Once"),
    ]


def test_a_list_is_read_like_lines_and_a_line_separator_inside_a_text_ends_none(tmp_path: Path) -> None:
    odd = {"question_id": 1, "category": "c", "turns": ["a\u2028b"]}
    file = tmp_path / "data.json"
    file.write_text(json.dumps([SPEC, odd], indent=1, ensure_ascii=False))
    lines = written(tmp_path, SPEC, json.dumps(odd, ensure_ascii=False))
    assert read(file) == read(lines)
    assert len(read(lines)) == 2


def test_a_conversation_in_which_nobody_asks_is_left_out(tmp_path: Path) -> None:
    silent = {"id": "s", "conversations": [{"from": "gpt", "value": "Hello."}]}
    empty = {"id": "e", "conversations": []}
    assert [prompt.name for prompt in read(written(tmp_path, silent, empty, SHARE))] == ["a1"]
    with pytest.raises(ConfigError, match="holds no prompts"):
        read(written(tmp_path, silent))


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([SPEC, '{"turns": [}'], "line 2: not JSON: Expecting value"),
        ([SPEC, "", {"question": "Why?"}], "line 3: it is neither Spec-Bench (`turns`)"),
        (["3"], "line 1: a JSON object is needed"),
        (["[" * 100_000], "line 1: not JSON"),
        (["[1, 2]"], "entry 1: a JSON object is needed"),
        ([{"turns": [3]}], "line 1: turns[0] must be text"),
        ([{"conversations": [{"from": "human"}]}], "line 1: 'value' is missing"),
        ([{"custom_id": "x", "body": {}}], "line 1: 'prompt' is missing"),
        ([{"custom_id": "x", "body": {"messages": []}}], "line 1: body.messages is empty"),
        ([{"body": {"messages": [{"role": "user", "content": None}]}}], "line 1: content must be text"),
        ([], "holds no prompts"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, lines: list[object], says: str) -> None:
    with pytest.raises(ConfigError) as fault:
        read(written(tmp_path, *lines))
    assert says in str(fault.value)
    assert str(tmp_path / "data.jsonl") in str(fault.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"turns": ["\xe9"]}')
    with pytest.raises(ConfigError, match="UTF-8"):
        read(tmp_path / "latin.jsonl")


def names(found: list[Prompt]) -> list[str]:
    return [prompt.name for prompt in found]


def test_a_choice_is_even_over_the_categories_and_within_each() -> None:
    """Taking the first ones would measure one category, or the prompts that a file begins with."""
    sizes = {"a": 40, "b": 5, "c": 1}
    prompts = [Prompt(f"{name}{i}", name, "x") for name, size in sizes.items() for i in range(size)]
    assert names(spread(prompts, 5)) == ["a10", "b1", "c0", "a30", "b3"]
    assert names(spread(prompts, 4)) == ["a10", "b2", "c0", "a30"]
    assert names(spread(prompts, 2)) == ["a20", "b2"]
    assert sorted(names(spread(prompts, 100))) == sorted(names(prompts))


def test_the_built_in_prompts_are_each_of_their_own_kind() -> None:
    found = built_in()
    assert len({prompt.category for prompt in found}) == len(found) == 8

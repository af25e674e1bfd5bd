"""The terminal view against servers that answer, refuse, vanish and lie."""

from __future__ import annotations

import io
import json
from typing import Any

import httpx
import pytest
from rich.console import Console
from support import overview

from gammaray.errors import Forbidden, GammarayError, InvalidRequest, Unauthorized
from gammaray.telemetry.screen import screen, standing
from gammaray.telemetry.top import top


def answers(*replies: Any) -> httpx.MockTransport:
    """One after the other; an exception is raised."""
    rest = iter(replies)

    def reply(request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path) == ("GET", "/gammaray/v1/overview")
        answer = next(rest)
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(200, json=answer) if isinstance(answer, dict) else answer

    return httpx.MockTransport(reply)


def refusal(status: int, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message}})


def shown(data: dict[str, Any], width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(screen(data))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_line_for_each_tenant_with_the_worst_first() -> None:
    text = shown(overview.busy())
    names = [line.split()[0] for line in text.splitlines()[2:]]
    assert names == ["default", "translate", "search", "chat", "code", "summaries"]
    chat = overview.busy()["tenants"][0]
    (line,) = (line for line in text.splitlines() if line.startswith("chat "))
    for part in (
        f"{chat['alpha']:.2f}",
        f"{chat['tau']:.2f}",
        f"{chat['S_low']:.2f}..{chat['S_high']:.2f}",
        f"{100 * chat['FR']:.1f} %",
        "3-5/1-2",
        "● on",
    ):
        assert part in line


def test_numbers_that_nobody_knows_are_dashes() -> None:
    data = overview.busy(["one"])
    data["tenants"][0].update(dict.fromkeys(("alpha", "tau", "S", "S_low", "S_high", "FR", "requests_per_s")))
    data["tenants"][0]["classes"] = []
    assert "None" not in shown(data)
    assert shown(data).splitlines()[-1].split()[3:7] == ["-", "-", "-", "-..-"]


def test_a_tenant_is_as_its_drafters_are() -> None:
    data = overview.busy(["one", "two"], lambda _: "on")
    data["tenants"][0]["classes"][1]["keys"][0]["state"] = "probe"
    data["tenants"][1]["classes"][1]["state"] = "off"
    assert [standing(one) for one in data["tenants"]] == [("probe", 1, 2), ("off", 1, 2)]
    assert "■ off 1/2" in shown(data).splitlines()[2]


def test_alarms_are_told() -> None:
    assert "kill switch" not in shown(overview.busy()) and "silent" not in shown(overview.busy())
    data = overview.busy() | {"speculation": False, "controller": {"state": "silent", "age_s": 31.0}}
    assert "the kill switch is on" in shown(data)
    assert "silent for 31 s" in shown(data)


def test_an_empty_cluster() -> None:
    assert "no tenant has sent a request yet" in shown(overview.empty())


@pytest.mark.parametrize("name", ["[red]x[/red]", "\x1b[2Jx", "a\nb", "\x07", "\u202ex"])
def test_names_stay_text(name: str) -> None:
    text = shown(overview.busy([name]))
    assert not {c for c in text if not c.isprintable()} - {"\n"}
    assert len(text.splitlines()) == 3
    if name.isprintable():
        assert name in text


def test_once(capsys) -> None:
    asked: list[httpx.Request] = []

    def reply(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json=overview.busy())

    top("http://test", "gr-ops", once=True, transport=httpx.MockTransport(reply))
    assert "summaries" in capsys.readouterr().out
    assert [request.headers["authorization"] for request in asked] == ["Bearer gr-ops"]


def test_json_is_the_overview(capsys) -> None:
    top("http://test", "gr-ops", once=True, as_json=True, transport=answers(overview.busy()))
    assert json.loads(capsys.readouterr().out) == overview.busy()


def test_json_again_and_again_until_interrupted(capsys) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    top("http://test", as_json=True, interval_s=7, sleep=sleep, transport=answers(*[overview.empty()] * 3))
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert pauses == [7, 7, 7]


@pytest.mark.parametrize(
    ("status", "error"), [(401, Unauthorized), (403, Forbidden), (404, GammarayError), (503, GammarayError)]
)
def test_a_refusal_is_the_servers_own_sentence(status: int, error: type[GammarayError]) -> None:
    with pytest.raises(error, match="said the server") as raised:
        top("http://test", once=True, transport=answers(refusal(status, "said the server")))
    assert ("GAMMARAY_OPERATOR_KEY" in str(raised.value)) == (status in (401, 403))


@pytest.mark.parametrize(
    "answer", [httpx.ConnectError("refused"), httpx.ReadTimeout("late"), httpx.Response(200, text="<html>")]
)
def test_where_no_server_answers_the_way_to_one_is_told(answer) -> None:
    with pytest.raises(GammarayError, match=r"no model server answers at http://test.*gammaray serve"):
        top("http://test", once=True, transport=answers(answer))


def test_a_key_that_no_header_can_hold_is_not_shown() -> None:
    with pytest.raises(InvalidRequest) as raised:
        top("http://test", "gr-sécret", once=True)
    assert "cret" not in str(raised.value)


def view(*replies: Any, pauses: int) -> str:
    """What a running view wrote in that many pauses."""
    console = Console(file=io.StringIO(), width=140, height=20, force_terminal=True, color_system=None)
    left = iter(range(pauses))

    def sleep(_: float) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    top("http://test", console=console, sleep=sleep, transport=answers(*replies))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_view_waits_for_a_server_that_is_lost() -> None:
    other = overview.busy(["afterwards"])
    text = view(overview.busy(), httpx.ConnectError("gone"), refusal(503, "busy"), other, pauses=3)
    seen = [text.index(part) for part in ("summaries", "no model server answers", "busy", "afterwards")]
    assert seen == sorted(seen)


def test_a_view_ends_when_the_key_does() -> None:
    with pytest.raises(Unauthorized):
        view(overview.busy(), refusal(401, "nobody has this API key"), pauses=5)

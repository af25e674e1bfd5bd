"""`gammaray tenants`: the tenants of a running server, from the command line.

Exit codes: 0 good, 1 a finding or a failure, 2 bad input.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from gammaray.errors import GammarayError, InvalidRequest
from gammaray.yamlfile import read

PREFIX = "/gammaray/v1"
TIMEOUT_S = 30.0
Json = dict[str, Any]
BAD_INPUT = range(400, 500)  # but for those that another time mends
PASSING = (408, 429)

Url = Annotated[str, typer.Option(help="A running server.")]
OperatorKey = Annotated[
    str | None,
    typer.Option(
        "--operator-key",
        envvar="GAMMARAY_OPERATOR_KEY",
        help="Operator's key. Other users of this machine can see it; the variable they cannot.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Report as JSON.")]
Name = Annotated[str, typer.Argument(metavar="TENANT")]
Class = Annotated[str | None, typer.Option("--class", help="Only of this class.")]
Drafter = Annotated[str | None, typer.Option(help="Only with this drafter.")]
LOCAL = "http://127.0.0.1:8000"

tenants = typer.Typer(no_args_is_help=True, help="Tenants of a running server, without restarts.")


class Server:
    """The operator's routes of one server. Raises InvalidRequest for what it refuses, else GammarayError."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url.rstrip("/") + PREFIX
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def ask(self, method: str, path: str, body: object = None, **query: object) -> Json:
        import httpx

        wanted = {name: str(value) for name, value in query.items() if value is not None}
        try:
            answer = httpx.request(
                method, self._url + path, json=body, params=wanted, headers=self._headers, timeout=TIMEOUT_S
            )
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise GammarayError(f"no server answers at {self._url}: {error}") from None
        return _told(answer.status_code, answer.content)

    def of(self, tenant: str, action: str = "") -> str:
        """The path of a tenant's route."""
        return f"/tenants/{quote(tenant, safe='')}{action}"


def _told(status: int, content: bytes) -> Json:
    try:
        told = json.loads(content)
    except ValueError:
        raise GammarayError(f"the server answered {status} without JSON; is it gammaray's?") from None
    if status < 400:
        return dict(told)
    message = told["error"]["message"]
    raise (InvalidRequest if status in BAD_INPUT and status not in PASSING else GammarayError)(message)


def _say(told: Json, as_json: bool, text: str) -> None:
    print(json.dumps(told) if as_json else text)


@tenants.command("list")
def show_all(url: Url = LOCAL, operator_key: OperatorKey = None, as_json: AsJson = False) -> None:
    """Every tenant: state, drafter, keys, tokens of today."""
    told = Server(url, operator_key).ask("GET", "/tenants")
    columns = ("tenant", "state", "drafter", "keys", "tokens_today", "tokens_per_day")
    _say(told, as_json, _table(columns, told["tenants"]))


@tenants.command()
def show(name: Name, url: Url = LOCAL, operator_key: OperatorKey = None, as_json: AsJson = False) -> None:
    """A tenant's settings, as a configuration would have them, and how it is."""
    server = Server(url, operator_key)
    told = server.ask("GET", server.of(name))
    _say(told, as_json, _yaml(told))


@tenants.command()
def add(
    file: Annotated[
        Path, typer.Argument(help="YAML: names, and settings as in a configuration's `tenants`.")
    ],
    url: Url = LOCAL,
    operator_key: OperatorKey = None,
    as_json: AsJson = False,
) -> None:
    """Make tenants, or replace those that are there."""
    server, made = Server(url, operator_key), []
    for name, settings in _tenants_of(file).items():
        try:
            made.append(server.ask("PUT", server.of(name), settings or {}))
        except GammarayError as error:
            done = ", ".join(one["tenant"] for one in made)
            error.message = f"{name}: {error.message}" + (f" (done before it: {done})" if done else "")
            error.args = (error.message,)
            raise
    lines = [f"{one['tenant']}: revision {one['revision']}{_notes(one)}" for one in made]
    _say({"tenants": made}, as_json, "\n".join(lines))


@tenants.command()
def remove(name: Name, url: Url = LOCAL, operator_key: OperatorKey = None, as_json: AsJson = False) -> None:
    """Take a tenant away; its open requests finish."""
    server = Server(url, operator_key)
    told = server.ask("DELETE", server.of(name))
    _say(told, as_json, f"{name}: removed")


@tenants.command("set")
def change(
    name: Name,
    settings: Annotated[
        list[str],
        typer.Argument(metavar="KEY=VALUE...", help="Such as speculation.gamma=3; null: the default."),
    ],
    url: Url = LOCAL,
    operator_key: OperatorKey = None,
    as_json: AsJson = False,
) -> None:
    """Change settings of a tenant."""
    server = Server(url, operator_key)
    told = server.ask("PATCH", server.of(name), patch(settings))
    _say(told, as_json, f"{name}: revision {told['revision']}{_notes(told)}")


def _add_order(action: str, done: str, about: str) -> None:
    """A command that orders something for a tenant, a class of it, or a drafter."""

    @tenants.command(action, help=about)
    def order(
        name: Name,
        cls: Class = None,
        drafter: Drafter = None,
        url: Url = LOCAL,
        operator_key: OperatorKey = None,
        as_json: AsJson = False,
    ) -> None:
        server = Server(url, operator_key)
        told = server.ask("POST", server.of(name, f"/{action}"), {"class": cls, "drafter": drafter})
        _say(told, as_json, f"{name}: {done} (policy {told['version']}, {told['changed']} changed)")


_add_order("pin-off", "pinned off", "Turn speculation off until `unpin`, whatever is measured.")
_add_order("unpin", "unpinned", "Leave speculation to the controller again, which probes it first.")
_add_order("reset", "reset", "Begin anew, as if just seen first: also after a violated quality gate.")


@tenants.command()
def rotate_key(
    name: Name,
    key: Annotated[str | None, typer.Option(help="Which key goes, if there are several.")] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for which the old key stays good.")] = 0.0,
    url: Url = LOCAL,
    operator_key: OperatorKey = None,
    as_json: AsJson = False,
) -> None:
    """Make a new key and print it, once; the old one ends."""
    server = Server(url, operator_key)
    told = server.ask("POST", server.of(name, "/rotate-key"), {"key": key, "grace_s": grace})
    _say(told, as_json, f"key:  {told['key']}\nname: {told['name']}")


@tenants.command()
def split(name: Name, url: Url = LOCAL, operator_key: OperatorKey = None, as_json: AsJson = False) -> None:
    """Give long prompts a class of their own, as the tenant's heat map suggests."""
    server = Server(url, operator_key)
    told = server.ask("POST", server.of(name, "/suggestion"))
    _say(told, as_json, f"{name}: revision {told['revision']}")


@tenants.command()
def roll_back(
    name: Name,
    what: Annotated[str, typer.Argument(metavar="drafter|policy")],
    cls: Annotated[str, typer.Option("--class", help="Whose drafter.")] = "default",
    url: Url = LOCAL,
    operator_key: OperatorKey = None,
    as_json: AsJson = False,
) -> None:
    """Go back to a class's previous drafter version, or to the tenant's previous draft shapes."""
    server = Server(url, operator_key)
    told = server.ask("POST", server.of(name, "/roll-back"), {"what": what, "class": cls})
    _say(told, as_json, f"{name}: rolled back (policy {told['version']})")


@tenants.command()
def kill_switch(
    position: Annotated[str, typer.Argument(metavar="on|off", help="on: nobody speculates.")],
    url: Url = LOCAL,
    operator_key: OperatorKey = None,
    as_json: AsJson = False,
) -> None:
    """Stop speculation of all tenants, or allow it again."""
    if position not in ("on", "off"):
        raise InvalidRequest(f"the kill switch is on or off, not {position!r}")
    told = Server(url, operator_key).ask("POST", "/kill-switch", {"on": position == "on"})
    _say(told, as_json, "nobody speculates" if told["on"] else "speculation is allowed")


@tenants.command()
def usage(
    day: Annotated[str | None, typer.Option(help="A UTC day, as 2026-11-30; else today.")] = None,
    url: Url = LOCAL,
    operator_key: OperatorKey = None,
    as_json: AsJson = False,
) -> None:
    """Sequences and tokens of each tenant on a day."""
    told = Server(url, operator_key).ask("GET", "/usage", day=day)
    rows = [{"tenant": tenant, **used} for tenant, used in told["tenants"].items()]
    columns = ("tenant", "sequences", "prompt_tokens", "output_tokens", "tokens")
    _say(told, as_json, f"{told['day']}\n{_table(columns, rows)}")


@tenants.command()
def replay(
    file: Annotated[Path, typer.Argument(help="The controller's audit log; no server is asked.")],
    as_json: AsJson = False,
) -> None:
    """Decide everything in an audit log again; exit code 1 when something comes out differently."""
    from gammaray.routing import audit

    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidRequest(f"cannot read {str(file)!r}: {reason}") from None
    records, found = list(audit.read(lines)), []
    for run, part in groupby(enumerate(records, 1), key=lambda item: item[1].get("run")):
        numbered = list(part)
        for mismatch in audit.replay(record for _, record in numbered):
            line = numbered[mismatch.index][0]
            found.append({"line": line, "run": run, "key": list(mismatch.key), "why": mismatch.why})
    told = {"decisions": len(records), "mismatches": found}
    lines = [f"line {one['line']}: {one['why']}" for one in found]
    _say(told, as_json, "\n".join([*lines, f"{len(records)} decisions, {len(found)} come out differently"]))
    raise typer.Exit(1 if found else 0)


def patch(settings: Iterable[str]) -> Json:
    """The JSON merge patch of `a.b=value`; values are YAML. Raises InvalidRequest."""
    tree: Json = {}
    for setting in settings:
        path, equals, value = setting.partition("=")
        *above, last = path.split(".")
        if not equals or not all([*above, last]):
            raise InvalidRequest(
                f"write a setting as KEY=VALUE, such as speculation.gamma=3 (got {setting!r})"
            )
        inner = tree
        for part in above:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise InvalidRequest(f"{setting!r} contradicts another setting")
        if isinstance(inner.get(last), dict):
            raise InvalidRequest(f"{setting!r} contradicts another setting")
        inner[last] = read(value, setting)
    return tree


def _tenants_of(file: Path) -> Mapping[str, Any]:
    try:
        tree = read(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidRequest(f"cannot read {str(file)!r}: {reason}") from None
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        raise InvalidRequest(
            f"{file}: write tenants as in a configuration, such as shop: {{drafter: lookup}}"
        )
    return tree


def _yaml(told: object) -> str:
    import yaml

    return yaml.safe_dump(told, sort_keys=False, width=100).rstrip("\n")


def _notes(told: Json) -> str:
    return "".join(f"\n  {note}" for note in told["notes"])


def _table(columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> str:
    names = list(columns)
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def _cell(value: object) -> str:
    return "-" if value is None else str(value)

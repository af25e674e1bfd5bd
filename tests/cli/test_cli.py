"""The command as a user runs it: exit codes, one line of error, and a quick start."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import subprocess
import sys

import pytest
import yaml

from gammaray import __version__, cli
from gammaray.config import Config, parse
from gammaray.yamlfile import read


def gammaray(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gammaray.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, input=stdin)


def load_text(text: str) -> Config:
    return parse(read(f"target: {{model: x}}\n{text}", "test"), "test")


def test_version() -> None:
    done = gammaray("--version")
    assert (done.returncode, done.stdout) == (0, f"gammaray {__version__}\n")


def test_help_names_the_commands_and_imports_nothing_heavy() -> None:
    code = """
import json, sys
from gammaray.cli import app
try:
    app(["--help"])
except SystemExit:
    heavy = {"torch", "ray", "transformers", "fastapi", "pydantic"}
    print(json.dumps(sorted(heavy & set(sys.modules))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "serve" in done.stdout and "chat" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_print_config() -> None:
    done = gammaray("serve", "--print-config", "--port", "9001")
    assert done.returncode == 0
    server = yaml.safe_load(done.stdout)["server"]
    assert (server["host"], server["port"], server["require_api_key"]) == ("127.0.0.1", 9001, False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "/nowhere.yaml"], "cannot read configuration '/nowhere.yaml'"),
        (["serve", "--port", "0"], "server.port"),
        (["serve", "--bogus"], "No such option"),
        (["srve"], "No such command"),
        (["key", "--name", "a b"], "a key cannot be named 'a b'"),
        (["chat", "--tenant-key", "gr-\xe4"], "the key has characters that no key has"),
    ],
)
def test_bad_input_is_2_and_no_traceback(arguments: list[str], says: str) -> None:
    done = gammaray(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_config_error_is_one_line() -> None:
    assert len(gammaray("serve", "/nowhere.yaml").stderr.splitlines()) == 1


def test_a_port_in_use_stops_before_ray_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = gammaray("serve", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "Address already in use; choose another address with --host or --port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["main", "on", "1", "a.b-c_D"])
def test_a_key_is_printed_once_with_its_line(name: str) -> None:
    done = gammaray("key", "--name", name)
    key, line = (text.split(maxsplit=1)[1] for text in done.stdout.splitlines())
    assert yaml.safe_load(line) == {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()}
    assert load_text(f"tenants: {{a: {{api_keys: [{line}]}}}}").tenants["a"].api_keys[0].name == name


@pytest.mark.parametrize("sent", ["sk-old", "sk-old\n"])
def test_a_key_that_clients_have_is_kept_and_not_shown(sent: str) -> None:
    done = gammaray("key", "--from-stdin", "--name", "web", stdin=sent)
    (line,) = done.stdout.splitlines()
    own = {"name": "web", "sha256": hashlib.sha256(b"sk-old").hexdigest()}
    assert yaml.safe_load(line) == {"config": own}
    assert json.loads(gammaray("key", "--from-stdin", "--name", "web", "--json", stdin=sent).stdout) == own
    assert "sk-old" not in done.stdout + done.stderr


@pytest.mark.parametrize("sent", ["", "\n", "sk-one\nsk-two", "sk old", "sk-\xe4"])
def test_what_is_no_key_is_refused_and_not_shown(sent: str) -> None:
    done = gammaray("key", "--from-stdin", stdin=sent)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no key on standard input" in done.stderr and "sk" not in done.stderr


def test_keys_as_json() -> None:
    first, second = (json.loads(gammaray("key", "--json").stdout) for _ in range(2))
    assert set(first) == {"key", "name", "sha256"}
    assert first["key"] != second["key"]
    assert first["sha256"] == hashlib.sha256(first["key"].encode()).hexdigest()


def test_chat_without_a_server_is_1() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    done = gammaray("chat", "--url", f"http://127.0.0.1:{port}")
    assert done.returncode == 1
    assert "gammaray serve" in done.stderr


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "127.0.0.1:99999"])
def test_a_cluster_that_is_not_there_is_2(address: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        done = gammaray("serve", "--address", address.format(port=closed.getsockname()[1]))
    assert done.returncode == 2
    assert "no Ray cluster answers at 127.0.0.1:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_written_to_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/checkpoint")

    monkeypatch.setattr(cli, "app", full)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "gammaray: [Errno 28] No space left on device: 'run/checkpoint'\n"

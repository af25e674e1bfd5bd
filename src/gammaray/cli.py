"""The command `gammaray`. Each command is a small function that imports what it needs when it runs.

Exit codes: 0 good, 1 a finding or a failure, 2 bad input.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from getpass import getpass
from pathlib import Path
from typing import Annotated, Any

import typer

from gammaray import __version__
from gammaray.errors import ConfigError, GammarayError, InvalidRequest
from gammaray.tenants_cli import tenants
from gammaray.train_cli import train
from gammaray.types import PLAIN, SamplingParams, SpeculationPlan

EMBEDDED = "smollm2-135m-instruct"
NAMES = "ngram, suffix, recycle, lookahead, layer_exit:N, eagle3:FOLDER, A+B, or a model"

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
benches = typer.Typer(no_args_is_help=True, help="Measure this machine.")
app.add_typer(benches, name="bench")
app.add_typer(tenants, name="tenants")
app.add_typer(train, name="train")


def main() -> None:
    """The entry point: errors of ours become one message and an exit code, without a traceback."""
    try:
        app()
    except GammarayError as error:
        print(f"gammaray: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError | InvalidRequest) else 1)
    except OSError as error:  # a full disk, a folder that is not to be written to
        print(f"gammaray: {error}", file=sys.stderr)
        sys.exit(1)


def _use_cores() -> None:
    """For commands that decode in this process; must come before torch is imported."""
    from gammaray.engine.threads import asked_threads, compute_with, usable_cores

    compute_with(asked_threads() or usable_cores())


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"gammaray {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve language models on Ray, faster by lossless speculative decoding."""


@app.command()
def serve(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file; without one: SmolLM2-135M-Instruct on CPU.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Where HTTP listens, instead of what CONFIG says.")] = None,
    port: Annotated[int | None, typer.Option(help="Its port, instead of what CONFIG says.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Join this Ray cluster instead of starting one on this machine.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the whole configuration and exit.")
    ] = False,
) -> None:
    """Start an OpenAI-compatible server; Ctrl-C stops it."""
    from gammaray.config import dump, load

    settings = load(config).with_server(host, port)
    if print_config:
        print(dump(settings), end="")
        return
    from gammaray.cluster.run import run

    run(settings, address)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="A running server.")] = "http://127.0.0.1:8000",
    tenant_key: Annotated[
        str | None,
        typer.Option(
            "--tenant-key",
            envvar="GAMMARAY_API_KEY",
            help="API key. Other users of this machine can see it; the variable they cannot.",
        ),
    ] = None,
) -> None:
    """Chat with a running server. /reset forgets the conversation, /exit leaves, Ctrl-C stops an answer."""
    from gammaray.api.terminal import talk

    talk(url, tenant_key)


@app.command()
def key(
    name: Annotated[str, typer.Option(help="What logs call the key.")] = "main",
    from_stdin: Annotated[
        bool,
        typer.Option("--from-stdin", help="Read a key that clients have already; it is not printed again."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Make an API key: for a client the key, which is kept nowhere; for the configuration its line."""
    from gammaray.api.auth import fingerprint, fresh_key, given_key
    from gammaray.config import check_key, flow

    secret = "" if from_stdin else fresh_key()
    entry = check_key(name, fingerprint(given_key(_typed()) if from_stdin else secret.encode()))
    shown = {"key": secret} if secret else {}
    if as_json:
        print(json.dumps({**shown, "name": entry.name, "sha256": entry.sha256}))
    else:
        print(*(f"key:    {secret}\n" for _ in shown), f"config: {flow(entry)}", sep="", end="")


def _typed() -> bytes:
    """Standard input; a terminal does not show what is typed."""
    return getpass("key: ").encode() if sys.stdin.isatty() else sys.stdin.buffer.read()


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads standard input.")],
    model: Annotated[str, typer.Option(help="Alias, folder, GGUF file or Hugging Face id.")] = EMBEDDED,
    drafter: Annotated[str, typer.Option(help=f"none, {NAMES} with the same vocabulary.")] = "ngram",
    gamma: Annotated[int, typer.Option(min=1, max=16, help="Draft depth.")] = 8,
    width: Annotated[int, typer.Option(min=1, max=8, help="Children a level of the draft tree.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1)] = 128,
    seed: Annotated[int, typer.Option(help="Of the noise; counts only above temperature 0.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt, without the chat template.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Time plain and speculative decoding, in float32 unless --dtype."),
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Of --compare, in turn; medians are shown.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Answer one prompt in this process, without Ray."""
    _use_cores()
    from gammaray.drafter_names import alone, entries
    from gammaray.engine import local

    dtype = dtype or ("float32" if compare else "auto")
    config = alone({"model": model}, dtype, {} if drafter == "none" else entries(drafter, dtype))
    plan = PLAIN if drafter == "none" else SpeculationPlan(drafter, gamma, width)
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    text = sys.stdin.read() if prompt == "-" else prompt
    raise typer.Exit(local.command(config, text, plan, sampling, raw, repeats if compare else 0, as_json))


@app.command()
def top(
    url: Annotated[str, typer.Option(help="A running server.")] = "http://127.0.0.1:8000",
    operator_key: Annotated[
        str | None,
        typer.Option(
            "--operator-key",
            envvar="GAMMARAY_OPERATOR_KEY",
            help="Other users of this machine can see it; the variable they cannot.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="One look.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="The overview as one line of JSON.")] = False,
) -> None:
    """Watch the tenants of a running server; Ctrl-C leaves."""
    from gammaray.telemetry.top import top as watch

    watch(url, operator_key, once=once, as_json=as_json, interval_s=interval)


@app.command()
def topology(
    source: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Read this file instead of the driver; again for another node."),
    ] = None,
    gpu_name: Annotated[
        str | None, typer.Option(help="What the GPUs are, such as 'NVIDIA H100 80GB HBM3'.")
    ] = None,
    min_nvlink_version: Annotated[float, typer.Option(min=1, help="Older links do not count.")] = 4.0,
    save: Annotated[Path | None, typer.Option(help="Write what was read to this file, for --from.")] = None,
    labels: Annotated[
        bool, typer.Option("--labels", help="Only the labels for `ray start --labels`, a line for each node.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Show this machine's GPUs, their NVLink islands, and why a link does not count."""
    from gammaray.cluster import matrix, nvml, saved, show

    found = matrix.read_all(source, gpu_name) if source else [nvml.this_machine(gpu_name)]
    if save:
        saved.save(found, save)
    if labels:
        print(show.labels(found, {} if source else os.environ, as_json))
    elif as_json:
        print(json.dumps(show.as_json(found, min_nvlink_version)))
    else:
        print(show.as_text(found, min_nvlink_version))


@app.command()
def plan(
    config: Annotated[Path | None, typer.Argument(help="YAML file; without one: the default.")] = None,
    more: Annotated[list[Path] | None, typer.Argument(help="More files for --topology.")] = None,
    topology: Annotated[
        list[str] | None,
        typer.Option(
            "--topology",
            metavar="FILE",
            help="Plan for the nodes of these files instead of this machine; with --values POOL=FILE.",
        ),
    ] = None,
    values: Annotated[
        list[Path] | None,
        typer.Option("--values", help="Plan for a release of the chart with these values; again: over them."),
    ] = None,
    gpu_name: Annotated[
        str | None, typer.Option(help="What the GPUs are, such as 'NVIDIA H100 80GB HBM3'.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Print which GPU would hold what, and why; start nothing. Exit code 1 when something has no place."""
    import psutil

    from gammaray.cluster import matrix, nvml, release, show_plan
    from gammaray.cluster.forecast import forecast
    from gammaray.config import load

    if values:
        if config or gpu_name:
            raise ConfigError("--values holds the configuration and names the GPUs: give neither beside it")
        made = release.plan_values(values, topology or ())
    else:
        settings, files = load(config), [*map(Path, topology or ()), *(more or ())]
        found = matrix.read_all(files, gpu_name) if files else [nvml.this_machine(gpu_name)]
        memory = {} if files else {found[0].node: psutil.virtual_memory().total}
        made = forecast(settings, found, memory)
    print(json.dumps(show_plan.as_json(made)) if as_json else show_plan.as_text(made))
    raise typer.Exit(1 if made.unplaced else 0)


@app.command()
def validate(
    config: Annotated[Path | None, typer.Argument(help="YAML file; without one: the default.")] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Also decode with speculation off and on, in float32, and compare.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Check the chain from checkpoint to scheduler; exit code 1 when a link is broken."""
    _use_cores()
    from gammaray.config import load
    from gammaray.engine.validate import report

    raise typer.Exit(report(load(config), run, as_json))


@benches.command("engine")
def bench_engine(
    dataset: Annotated[
        Path | None,
        typer.Option(help="Spec-Bench, ShareGPT or OpenAI-batch JSONL; without one: prompts of our own."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts, spread over the categories.")] = 26,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Of each answer.")] = 64,
    drafters: Annotated[
        str | None,
        typer.Option(
            help=f"NAME,NAME@GAMMAxWIDTH,... or a YAML file with a drafters map. Names of --config; {NAMES}."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file: its target, and drafters by their names there.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help=f"Instead of what --config names; without both: {EMBEDDED}.")
    ] = None,
    gamma: Annotated[int, typer.Option(min=1, max=16, help="Draft depth.")] = 8,
    width: Annotated[int, typer.Option(min=1, max=8, help="Children a level of the draft tree.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: the model's.")] = "float32",
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the noise; counts only above temperature 0.")] = 0,
    adaptive: Annotated[
        bool, typer.Option(help="Drafts are shortened to what pays, as a server does unless told otherwise.")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="Folder for engine.json and engine.md.")] = None,
    link: Annotated[bool, typer.Option("--link", help="Time the draft link instead.")] = False,
    tokens: Annotated[int, typer.Option(min=1, help="--link: in the drafts of all sequences together.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="--link: sequences in a round.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="--link: round trips over each transport.")] = 1000,
    ray: Annotated[
        bool, typer.Option(help="--link: also time a call of a Ray actor, for which Ray starts.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Time drafters against plain decoding, prompt by prompt, on one engine of this process, without Ray.

    Ctrl-C reports what was measured until then. Exit codes: 0 good; 1 an output differs from plain decoding
    in float32, a prompt failed, or the run was interrupted; 2 bad input.
    """
    if link:
        raise typer.Exit(_bench_link(tokens, batch, repeats, ray, as_json))
    _use_cores()
    from gammaray.config import load
    from gammaray.drafter_names import read_drafters
    from gammaray.engine.bench import command

    given: Mapping[str, Any] = {}
    target: dict[str, Any] = {"model": model or EMBEDDED}
    if config:
        settings = load(config)
        target, given = settings.target.model_dump() | ({"model": model} if model else {}), settings.drafters
    if drafters and drafters.endswith((".yaml", ".yml")):
        given, drafters = read_drafters(Path(drafters)), None
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    wanted = command.Wanted(
        target, given, drafters, gamma, width, dtype, dataset, limit, sampling, adaptive, out, _as_typed()
    )
    raise typer.Exit(command.run(wanted, as_json))


def _as_typed() -> str:
    return shlex.join(["gammaray", *sys.argv[1:]])


def _bench_link(tokens: int, batch: int, repeats: int, ray: bool, as_json: bool) -> int:
    from gammaray.cluster import local, processes
    from gammaray.engine.threads import compute_with

    compute_with(1)
    os.environ.update(local.environment(os.environ, local=True))
    with processes.none_left():
        from gammaray.actors.link import bench

        found = bench.report(tokens, batch, repeats, ray)
    print(json.dumps(found) if as_json else bench.as_text(found))
    return 0


@benches.command("kernels")
def bench_kernels(
    out: Annotated[
        list[Path] | None, typer.Option(help="Write to FILE.json or FILE.md; again for both.")
    ] = None,
    compile_only: Annotated[
        bool,
        typer.Option("--compile", help="Compile every variant for sm_80 and sm_90 instead; needs no GPU."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Check the GPU kernels and time them against memory floors, in at most 4 minutes; no GPU: check only.

    Exit codes: 0 nothing is wrong; 1 a result is wrong, or a variant spills or does not compile; 2 bad input,
    such as a file that cannot be written, or Triton is missing.
    """
    from gammaray.kernels.bench import command

    raise typer.Exit(command.run(out or [], compile_only, as_json))


if __name__ == "__main__":
    main()

"""`gammaray train`: make, judge and choose drafters for a target.

Every command works in a run folder and goes on there after it was stopped, also by kill -9:
data/ (corpus and features), checkpoint/ (the newest two), out/ (the drafter, its card and its report).
Exit codes: 0 good; 1 a finding, a failure, or stopped by Ctrl-C at a checkpoint; 2 bad input.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gammaray.errors import InvalidRequest
from gammaray.types import SamplingParams

if TYPE_CHECKING:
    from gammaray.training.command import Asked, Kind

Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="Alias, folder, GGUF file or Hugging Face id of the target.")
]
RunFolder = Annotated[
    Path, typer.Option("--run", metavar="FOLDER", help="What was begun in this folder goes on.")
]
Prompts = Annotated[
    Path | None,
    typer.Option(help="JSONL in a form of `bench engine --dataset`; without it: the target's own."),
]
HeldOut = Annotated[
    Path | None,
    typer.Option("--held-out", help="Prompts to judge by, in the same forms; else built-in ones."),
]
Minutes = Annotated[
    float | None, typer.Option(min=0, help="Train for so long at most: the learning rate comes down in time.")
]
Tokens = Annotated[int, typer.Option(min=1, help="That the target writes to learn from.")]
Temperatures = Annotated[str, typer.Option(help="Of what it writes, in turn.")]
DataFolder = Annotated[
    Path | None, typer.Option("--data", help="data/ of another run with this target, instead of its own.")
]
Epochs = Annotated[float, typer.Option(min=0.01, help="How often each text is learned from.")]
Rate = Annotated[float, typer.Option(min=0, help="The highest learning rate.")]
PassTokens = Annotated[int, typer.Option(min=16, help="Of one pass of the head; memory goes with it.")]
Passes = Annotated[int, typer.Option(min=1, help="Of a step, whose gradients are added up.")]
Bfloat16 = Annotated[bool, typer.Option(help="Products of matrices in bfloat16 while training.")]
Seed = Annotated[int, typer.Option(help="Of everything drawn: the same seed, the same drafter.")]
Dtype = Annotated[str, typer.Option(help="Of the target: float32, bfloat16, float16, or auto.")]
Drafter = Annotated[str, typer.Option(help="What `gammaray train` made, as a configuration's `path`.")]
Report = Annotated[bool, typer.Option(help="Measure what was made, without which no server takes it.")]
Limit = Annotated[int, typer.Option(min=1, help="Held-out prompts, spread over their categories.")]
Gamma = Annotated[int, typer.Option(min=1, max=16, help="Draft depth.")]
Width = Annotated[int, typer.Option(min=1, max=8, help="Children a level of the draft tree.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Of each answer.")]
AsJson = Annotated[bool, typer.Option("--json", help="Report as JSON.")]

train = typer.Typer(no_args_is_help=True, help="Make drafters for a target, judge them and choose.")


def _use_cores() -> None:
    """Must come before torch is imported."""
    from gammaray.engine.threads import asked_threads, compute_with, usable_cores

    compute_with(asked_threads() or usable_cores())


def _as_typed() -> str:
    return shlex.join(["gammaray", *sys.argv[1:]])


@train.command()
def eagle(
    target: Target,
    run: RunFolder,
    prompts: Prompts = None,
    data: DataFolder = None,
    tokens: Tokens = 400_000,
    temperatures: Temperatures = "0,0.7,1",
    epochs: Epochs = 4.0,
    minutes: Minutes = None,
    layers: Annotated[
        str | None, typer.Option(help="Of the target, that it reads; without it: low, middle and high.")
    ] = None,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Levels of a draft that it is taught.")] = 4,
    draft_vocab: Annotated[int, typer.Option(min=1, help="Tokens that it can draft.")] = 8192,
    inner: Annotated[int, typer.Option(min=0, help="Size of its MLP; 0: as in the target.")] = 0,
    own_head: Annotated[
        bool, typer.Option(help="It learns a projection to tokens, instead of rows of the target's.")
    ] = False,
    warm: Annotated[bool, typer.Option(help="Begin with the target's last layer, not with noise.")] = True,
    rate: Rate = 8e-3,
    pass_tokens: PassTokens = 2048,
    passes: Passes = 1,
    bfloat16: Bfloat16 = False,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    held_out: HeldOut = None,
    report: Report = True,
    as_json: AsJson = False,
) -> None:
    """Train an EAGLE-3 head on what the target writes itself.

    Several processes, as torchrun starts them, share the work. Ctrl-C stops at a checkpoint; the same command
    goes on.
    """
    _use_cores()
    from gammaray.training import command
    from gammaray.training import eagle3_command as eagle3

    asked = command.Asked(
        *(target, run, data, prompts, tokens, _temperatures(temperatures), epochs, minutes, rate),
        *(seed, dtype, pass_tokens, passes, bfloat16),
    )
    sizes = eagle3.Sizes(_numbers(layers), depth, draft_vocab, inner, own_head, warm)
    raise typer.Exit(_trained(asked, eagle3.kind(asked, sizes), held_out, report, as_json))


@train.command()
def dspark(
    target: Target,
    run: RunFolder,
    prompts: Prompts = None,
    data: DataFolder = None,
    tokens: Tokens = 400_000,
    temperatures: Temperatures = "0,0.7,1",
    epochs: Epochs = 4.0,
    minutes: Minutes = None,
    layers: Annotated[
        str | None, typer.Option(help="Of the target, that it reads; without it: low, middle and high.")
    ] = None,
    block: Annotated[int, typer.Option(min=1, max=16, help="Tokens that it drafts at once.")] = 5,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Its decoder layers.")] = 2,
    inner: Annotated[int, typer.Option(min=0, help="Size of their MLPs; 0: as in the target.")] = 0,
    rank: Annotated[int, typer.Option(min=0, help="Of the Markov head; 0: none.")] = 64,
    markov: Annotated[str, typer.Option(help="vanilla, gated or rnn.")] = "vanilla",
    draft_vocab: Annotated[int, typer.Option(min=1, help="Tokens that it can draft.")] = 8192,
    mask: Annotated[
        int, typer.Option(help="The token that stands for those to come; -1: the last of all.")
    ] = -1,
    rate: Rate = 8e-3,
    pass_tokens: PassTokens = 2048,
    passes: Passes = 1,
    bfloat16: Bfloat16 = False,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    held_out: HeldOut = None,
    report: Report = True,
    as_json: AsJson = False,
) -> None:
    """Train a block drafter with a Markov head and a confidence head, and calibrate the latter.

    Several processes, as torchrun starts them, share the work. Ctrl-C stops at a checkpoint; the same command
    goes on.
    """
    _use_cores()
    from gammaray.training import block_command, command
    from gammaray.training.dspark import Sizes

    asked = command.Asked(
        *(target, run, data, prompts, tokens, _temperatures(temperatures), epochs, minutes, rate),
        *(seed, dtype, pass_tokens, passes, bfloat16),
    )
    sizes = Sizes(block, depth, inner, rank, markov)
    kind = block_command.block(asked, block_command.Block(_numbers(layers), draft_vocab, mask, sizes))
    raise typer.Exit(_trained(asked, kind, held_out, report, as_json))


@train.command()
def confidence(
    target: Target,
    run: RunFolder,
    drafter: Annotated[str, typer.Option(help="Folder or Hugging Face id of a block drafter.")],
    prompts: Prompts = None,
    data: DataFolder = None,
    tokens: Tokens = 400_000,
    temperatures: Temperatures = "0,0.7,1",
    epochs: Epochs = 1.0,
    minutes: Minutes = None,
    rate: Rate = 8e-3,
    pass_tokens: PassTokens = 2048,
    passes: Passes = 1,
    bfloat16: Bfloat16 = False,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    held_out: HeldOut = None,
    report: Report = True,
    as_json: AsJson = False,
) -> None:
    """Train the confidence head of a block drafter again, and nothing else of it, and calibrate it.

    Ctrl-C stops at a checkpoint; the same command goes on.
    """
    _use_cores()
    from gammaray.training import block_command, command

    asked = command.Asked(
        *(target, run, data, prompts, tokens, _temperatures(temperatures), epochs, minutes, rate),
        *(seed, dtype, pass_tokens, passes, bfloat16),
    )
    kind = block_command.confidence(drafter)
    raise typer.Exit(_trained(asked, kind, held_out, report, as_json))


@train.command()
def medusa(
    target: Target,
    run: RunFolder,
    prompts: Prompts = None,
    data: DataFolder = None,
    tokens: Tokens = 400_000,
    temperatures: Temperatures = "0,0.7,1",
    epochs: Epochs = 4.0,
    minutes: Minutes = None,
    heads: Annotated[int, typer.Option(min=1, max=16, help="Tokens that they draft at once.")] = 4,
    layers: Annotated[int, typer.Option(min=1, max=16, help="Residual blocks of each head.")] = 1,
    own_vocabulary: Annotated[
        bool, typer.Option(help="Each head learns a projection to tokens, instead of the target's.")
    ] = False,
    rate: Rate = 8e-3,
    pass_tokens: PassTokens = 1024,
    passes: Passes = 1,
    bfloat16: Bfloat16 = False,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    held_out: HeldOut = None,
    report: Report = True,
    as_json: AsJson = False,
) -> None:
    """Train Medusa heads on what the target writes itself.

    Several processes, as torchrun starts them, share the work. Ctrl-C stops at a checkpoint; the same command
    goes on.
    """
    _use_cores()
    from gammaray.training import block_command, command

    asked = command.Asked(
        *(target, run, data, prompts, tokens, _temperatures(temperatures), epochs, minutes, rate),
        *(seed, dtype, pass_tokens, passes, bfloat16),
    )
    kind = block_command.medusa(block_command.Medusa(heads, layers, own_vocabulary))
    raise typer.Exit(_trained(asked, kind, held_out, report, as_json))


@train.command("report")
def report_command(
    target: Target,
    drafter: Drafter,
    held_out: HeldOut = None,
    limit: Limit = 26,
    gamma: Gamma = 4,
    width: Width = 1,
    max_tokens: MaxTokens = 64,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: greedy.")] = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    as_json: AsJson = False,
) -> None:
    """Measure a drafter on held-out prompts; write report.json and README.md into its folder.

    Without a report it answers no requests of a server. Exit code 1: an output differed in float32.
    """
    _use_cores()
    from gammaray import papers
    from gammaray.engine.drafters.head_loading import folder_of
    from gammaray.training import evaluate, report

    folder, sampling = folder_of(drafter), SamplingParams(temperature, seed=seed, max_tokens=max_tokens)
    entry = report.entry(folder)
    wanted = evaluate.Wanted(target, entry, held_out, limit, gamma, width, sampling, dtype)
    made = report.report(wanted, folder, _noting())
    print(made.model_dump_json() if as_json else (folder / papers.CARD).read_text(encoding="utf-8"))
    raise typer.Exit(1 if made.equal is False else 0)


@train.command("layer-search")
def layer_search(
    target: Target,
    out: Annotated[Path | None, typer.Option(help="Folder for layers.json and layers.png.")] = None,
    held_out: HeldOut = None,
    limit: Limit = 26,
    layers: Annotated[
        str | None, typer.Option(help="Only these, such as 4,8,12; without it: all of them.")
    ] = None,
    max_tokens: MaxTokens = 64,
    dtype: Dtype = "float32",
    as_json: AsJson = False,
) -> None:
    """Find after how many of its own layers a target drafts best: acceptance and speed of each.

    The earliest exit whose predicted speed-up is within 2 points of the best is taken. Exit code 1: none
    is faster than plain decoding.
    """
    _use_cores()
    from gammaray.training import layer_report
    from gammaray.training import layers as search

    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    wanted = search.Wanted(target, held_out, limit, _numbers(layers), sampling, dtype)
    found = layer_report.run(wanted, out, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(found.as_json()) if as_json else found.as_text())
    raise typer.Exit(0 if found.picked.speedup > 1 else 1)


@train.command()
def choose(
    target: Target,
    candidates: Annotated[
        str, typer.Option(help="NAME,NAME@GAMMAxWIDTH,...: names as `bench engine --drafters` takes them.")
    ],
    held_out: HeldOut = None,
    limit: Limit = 26,
    gamma: Gamma = 4,
    width: Width = 1,
    max_tokens: MaxTokens = 64,
    dtype: Dtype = "float32",
    min_alpha: Annotated[float, typer.Option(min=0, max=1, help="Of drafters with weights.")] = 0.55,
    max_latency: Annotated[float, typer.Option(min=0, help="Of a drafted token, of a plain one.")] = 0.30,
    max_size: Annotated[float, typer.Option(min=0, help="Parameters, of the target's.")] = 0.05,
    as_json: AsJson = False,
) -> None:
    """Choose among drafters: by size, acceptance and latency, then by reused KV, then by measured speed.

    Exit code 1: none is faster than plain decoding.
    """
    _use_cores()
    from gammaray.training import choose, funnel

    limits = funnel.Limits(largest=max_size, alpha=min_alpha, latency=max_latency)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    wanted = choose.Wanted(target, candidates, held_out, limit, gamma, width, sampling, dtype, limits)
    verdicts = choose.choose(wanted, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(funnel.as_json(verdicts)) if as_json else funnel.as_text(verdicts))
    raise typer.Exit(0 if any(one.chosen for one in verdicts) else 1)


@train.command()
def refresh(
    target: Target,
    drafter: Drafter,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="FOLDER", help="Where; without it: beside the run that made it."),
    ] = None,
    prompts: Prompts = None,
    held_out: HeldOut = None,
    limit: Limit = 26,
    as_json: AsJson = False,
) -> None:
    """Make a drafter anew when its target's weights changed, as it was made before, and report on it.

    Nothing is done for a target that is the same, unless the drafter has no report that counts.
    """
    _use_cores()
    from gammaray.engine.drafters.head_loading import folder_of
    from gammaray.training import command, refresh

    folder, code = folder_of(drafter), 0
    todo = refresh.plan(target, folder, run)
    print(
        json.dumps({"drafter": str(todo.drafter), "state": todo.state})
        if as_json
        else f"{drafter}: {todo.state}",
        flush=True,
    )
    if todo.state == "stale":
        asked, kind = refresh.again(target, folder, todo.run, prompts)
        code = command.train(asked, kind, as_json, _as_typed())
    if todo.state != "fresh":
        code = code or _report(target, todo.drafter, held_out, limit, as_json)
    raise typer.Exit(code)


def _trained(asked: Asked, kind: Kind, held_out: Path | None, report: bool, as_json: bool) -> int:
    """The exit code of a run, and of the report on what it made."""
    from gammaray.training import command

    code = command.train(asked, kind, as_json, _as_typed())
    return (
        _report(asked.target, asked.run / "out", held_out, as_json=as_json) if report and not code else code
    )


def _report(target: str, drafter: Path, held_out: Path | None, limit: int = 26, as_json: bool = False) -> int:
    """Of a drafter that was just made, under torchrun by the first process. The exit code."""
    from gammaray import papers
    from gammaray.training import evaluate, report

    if os.environ.get("RANK", "0") != "0":
        return 0
    wanted = evaluate.Wanted(target, report.entry(drafter), held_out, limit)
    made = report.report(wanted, drafter, _noting())
    alpha = "-" if made.total.alpha is None else f"{made.total.alpha:.2f}"
    said = f"{drafter}: alpha {alpha}, tau {made.total.tau:.2f}, {drafter / papers.CARD}"
    print(made.model_dump_json() if as_json else said)
    return 1 if made.equal is False else 0


def _numbers(text: str | None) -> tuple[int, ...]:
    """Raises InvalidRequest."""
    words = [word for word in (text or "").split(",") if word.strip()]
    if not all(word.strip().isdecimal() for word in words):
        raise InvalidRequest(f"--layers {text}: write numbers, such as 4,8,12")
    return tuple(dict.fromkeys(int(word) for word in words))


def _temperatures(text: str) -> tuple[float, ...]:
    """Raises InvalidRequest."""
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise InvalidRequest(f"--temperatures {text}: write numbers, such as 0,0.7") from None


def _noting() -> Callable[[Any, int], None]:
    """Says on stderr how far measuring is; the prompt's result too."""
    done = 0

    def note(one: Any, total: int) -> None:
        nonlocal done
        done += 1
        said = f"left out: {one.reason}" if hasattr(one, "reason") else one.prompt.category
        print(f"{done}/{total} {said}", file=sys.stderr, flush=True)

    return note

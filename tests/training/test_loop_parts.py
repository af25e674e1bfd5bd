"""What a run is made of: its way, batches, checkpoints and draft vocabulary, and how it is stopped."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from itertools import islice
from math import inf
from pathlib import Path

import pytest
import torch
from tiny import tiny_llama, tiny_model
from torch import nn
from torch.distributed.run import parse_args
from transformers import Gemma2Config

from gammaray.engine.loading import load_runner
from gammaray.errors import ConfigError
from gammaray.training import checkpoint, distributed
from gammaray.training.batches import Piece, endless, shuffled
from gammaray.training.command import Asked
from gammaray.training.corpus import Corpus, Document, seal
from gammaray.training.distributed import joined
from gammaray.training.draft_vocab import choose
from gammaray.training.heads import check_projects
from gammaray.training.optimizers import Optimizers
from gammaray.training.schedule import Schedule
from gammaray.training.stopping import stopping


def test_the_rate_rises_and_falls_and_the_way_ends_after_its_steps() -> None:
    schedule = Schedule(steps=300, rate=2.0, warmup=0.1, least=0.05)
    done, rates = 0.0, []
    while done < 1:
        rates.append(schedule.rate_at(done))
        done = schedule.after(done, seconds=9.0)
    assert len(rates) == 300, "sums of 1/300 are not 1"
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert top == 30 and rates[0] < 0.1 and rates[top] == pytest.approx(2.0, rel=0.01)
    assert rates[-1] == pytest.approx(0.1, rel=0.01)


def test_minutes_end_a_way_with_the_rate_down() -> None:
    """Cut off by the clock at a high rate, a head is much worse than it need be."""
    schedule = Schedule(steps=1000, minutes=1.0)
    done, rates = 0.0, []
    while done < 1:
        rates.append(schedule.rate_at(done))
        done = schedule.after(done, seconds=0.5)
    assert len(rates) == 120 and rates[-1] < 0.03 * max(rates)


PIECES = [Piece(document, 0, 3 + document * 7 % 40) for document in range(60)]


def test_an_epoch_has_each_piece_once_within_the_budget() -> None:
    batches = shuffled(PIECES, budget=100, seed=3)
    assert sorted(piece.document for batch in batches for piece in batch) == list(range(60))
    padded = [len(batch) * max(piece.length for piece in batch) for batch in batches]
    assert max(padded) <= 100 and sum(padded) < 1.3 * sum(piece.length for piece in PIECES)


def test_epochs_differ_and_a_seed_tells_them_all() -> None:
    size = len(shuffled(PIECES, 100, 3))
    one, two = (list(islice(endless(PIECES, 100, 3), 2 * size)) for _ in range(2))
    assert one == two and one[:size] != one[size:] and one[:size] != shuffled(PIECES, 100, 4)


def test_a_spoilt_checkpoint_costs_one_step_back(tmp_path: Path) -> None:
    for step in range(1, 5):
        checkpoint.save(tmp_path, step, {"number": step, "x": torch.full((2,), step)})
    assert len(list(tmp_path.iterdir())) == checkpoint.KEPT
    newest = max(tmp_path.iterdir())
    newest.write_bytes(newest.read_bytes()[:100])
    found = checkpoint.newest(tmp_path)
    assert found is not None and found["number"] == 3
    min(tmp_path.iterdir()).write_bytes(b"")
    with pytest.raises(ConfigError, match="can be read"):
        checkpoint.newest(tmp_path)


def test_one_wrong_bit_spoils_a_checkpoint(tmp_path: Path) -> None:
    """It would go on with other numbers, and nobody would know."""
    for step in (1, 2):
        file = checkpoint.save(tmp_path, step, {"number": step, "x": torch.full((4096,), float(step))})
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    found = checkpoint.newest(tmp_path)
    assert found is not None and found["number"] == 1


def test_the_draft_vocabulary_is_what_was_written_most() -> None:
    """Ties that fall as they may would give another head on another machine."""
    counts = torch.tensor([0, 5, 0, 9, 0, 1, 0])
    assert choose(counts, 3).tolist() == [1, 3, 5] and choose(counts, 5).tolist() == [0, 1, 2, 3, 5]
    with pytest.raises(ConfigError, match="8 of 7"):
        choose(counts, 8)


def test_half_an_environment_of_torchrun_is_refused() -> None:
    with joined({}) as world:
        assert (world.rank, world.size) == (0, 1)
    with pytest.raises(ConfigError, match="MASTER_PORT"), joined({"RANK": "0", "WORLD_SIZE": "2"}):
        pass


def test_torchrun_takes_the_command_that_the_docs_name() -> None:
    """It reads `--run` as a part of its own `--run-path` unless it is told where its options end."""
    assert "-m -- gammaray.cli train" in str(distributed.__doc__)
    train = ["train", "eagle", "t", "--run", "there"]
    asked = parse_args(["--nproc-per-node", "2", "-m", "--", "gammaray.cli", *train])
    assert (asked.training_script, asked.training_script_args) == ("gammaray.cli", train)


def test_a_first_ctrl_c_is_a_wish_and_a_second_is_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stopping() as asked:
        assert not asked()
        os.kill(os.getpid(), signal.SIGINT)
        assert asked()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_matrices_learn_by_muon_and_the_rest_by_adamw() -> None:
    """Muon on a table of tokens would make rows of tokens that were never seen as large as the others."""
    torch.manual_seed(0)
    module = nn.ModuleDict({"hidden": nn.Linear(8, 8), "table": nn.Linear(8, 24, bias=False)})
    before = {name: x.detach().clone() for name, x in module.named_parameters()}
    optimizers = Optimizers(module, [module["table"].weight], decay=0.0)
    for x in module.parameters():
        x.grad = torch.randn(x.shape)
    optimizers.step(0.1)
    moved = {name: x.detach() - before[name] for name, x in module.named_parameters()}
    sizes = torch.linalg.svdvals(moved["hidden.weight"])
    assert sizes.max() < 2 * sizes.min()
    assert torch.allclose(moved["hidden.bias"].abs(), torch.tensor(0.1), atol=1e-3)
    assert torch.allclose(moved["table.weight"].abs(), torch.tensor(0.025), atol=1e-3)


@pytest.mark.parametrize("value", [{"epochs": inf}, {"rate": inf}, {"minutes": 0.0}, {"seed": 2**70}])
def test_settings_that_cannot_be_are_refused_before_the_target_writes(value: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(Asked("any", Path("run")), **value)  # type: ignore[arg-type]


def test_a_target_that_caps_its_logits_is_refused() -> None:
    """Its head would be taught another distribution than the target's."""
    runner = load_runner(tiny_llama(24), "float32", num_blocks=4)
    check_projects(runner)
    cfg = {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 0.5}
    capped = load_runner(tiny_model(Gemma2Config, 24, **cfg), "float32", num_blocks=4)
    with pytest.raises(ConfigError, match="caps or scales"):
        check_projects(capped)


def test_a_run_learns_from_the_same_texts_when_others_were_added(tmp_path: Path) -> None:
    """Else a run on another run's data could not go on once that has grown."""
    for start in range(3):
        seal(tmp_path, [Document.answered([1], [start + 2] * 5), Document.answered([1], [start + 2] * 3)])
    corpus = Corpus.open(tmp_path)
    assert [len(corpus.first(tokens)) for tokens in (1, 8, 9, 24, 99, None)] == [2, 2, 4, 6, 6, 6]

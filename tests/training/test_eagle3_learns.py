"""An EAGLE-3 head learns, goes on exactly after kill -9, and says in the engine what it said in training."""

from __future__ import annotations

import socket
import time
from itertools import islice
from pathlib import Path

import pytest
import torch
from support import eagle_run, two_ranks
from support.eagle_run import DRAFTED, KEPT, LAYERS, Taught
from torch import Tensor, nn

from gammaray.drafter_config import Eagle3Drafter
from gammaray.engine.batch import Row
from gammaray.engine.drafters import eagle3
from gammaray.engine.drafters.base import DraftView
from gammaray.engine.drafters.registry import Making
from gammaray.training.batches import Batch, Piece
from gammaray.training.eagle3 import Eagle3Trainee
from gammaray.training.ttt import unroll
from gammaray.training.warm import begin_with
from gammaray.types import SamplingParams

DEPTH = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def taught(data: Path) -> Taught:
    return eagle_run.taught(data)


def test_loss_falls_and_held_out_acceptance_rises(taught: Taught, tmp_path: Path) -> None:
    """States that are a token off, or a loss against another place, would leave both where they are."""
    trainer = taught.trainer(tmp_path, steps=80)
    before = trainer.judge()
    losses = [step.loss for step in trainer.steps()]
    after = trainer.judge()
    assert sum(losses[-10:]) < 0.75 * sum(losses[:10])
    assert after["alpha"] > before["alpha"] + 0.2 and after["tau"] > 1.4
    assert all(after[f"alpha_{level}"] > 0.2 for level in range(1, DEPTH + 1)), after


# The engine -----------------------------------------------------------------------------------------------


def scatter(trainee: Eagle3Trainee) -> None:
    """Weights that all matter and that bfloat16 can tell, also when fc is divided by its scale."""
    draw = torch.Generator().manual_seed(2)
    module = trainee.module
    module.scale.copy_(2.0 ** torch.randint(-2, 3, module.scale.shape, generator=draw))
    for name, x in module.named_parameters():
        noise = 0.3 * torch.randn(x.shape, generator=draw)
        x.data = (noise + (1 if "norm" in name else 0)).bfloat16().float()


def drafted(taught: Taught, folder: Path, text: list[int]) -> tuple[list[int], tuple[float, ...]]:
    """The chain that the engine drafts behind a text, and how sure its drafter is of each token."""
    config = Eagle3Drafter(method="eagle3", path=str(folder), tree="static")
    drafter = eagle3.make(Making("d", config, taught.runner, "t", tokenizer=None))  # type: ignore[arg-type]
    drafter.catch_up("r", text[:1])
    drafter.commit("r", text[1:], states(taught, text, drafter.layers)[:-1])
    view = DraftView("r", len(text), DEPTH, 1, SamplingParams(temperature=0.0), 0)
    tree = drafter.collect(drafter.begin([view]), 0.0)["r"]
    assert tree.confidence is not None
    return list(tree.tokens), tree.confidence


def states(taught: Taught, tokens: list[int], layers: tuple[int, ...]) -> Tensor:
    return taught.runner.forward_features([Row(tokens, 0, range(4))], layers)[1]


@pytest.mark.parametrize("own_head", [False, True])
@torch.no_grad()
def test_the_engine_drafts_what_was_trained(taught: Taught, tmp_path: Path, own_head: bool) -> None:
    """Drafts from two places of one padded batch: each level tells what the engine's own level does."""
    trainee = taught.trainee(own_head=own_head)
    scatter(trainee)
    trainee.export(tmp_path)
    assert ("lm_head.weight" in trainee.module.tensors()) == own_head
    text = taught.texts.corpus.document(3)[0].tolist()
    chains = {length: drafted(taught, tmp_path, text[:length]) for length in (9, 14)}
    rows = [[*text[:length], *tokens] for length, (tokens, _) in chains.items()]
    tokens = torch.tensor([[*row, *[0] * (18 - len(row))] for row in rows])
    told = torch.stack([states(taught, row, KEPT) for row in tokens.tolist()])
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), told, KEPT)
    for level, behind in enumerate(trainee._levels(batch)):
        for row, (length, (chain, sure)) in enumerate(chains.items()):
            said = trainee._logits(trainee.module.norm(behind[row, length - 2])).softmax(-1)
            assert int(trainee._tokens[said.argmax()]) == chain[level]
            assert float(said.max()) == pytest.approx(sure[level], abs=1e-4), (level, length)


# What is learned ------------------------------------------------------------------------------------------


def test_the_loss_is_the_cross_entropy_with_what_the_target_says_there(taught: Taught) -> None:
    """Over the draft vocabulary, of answers only; a level that looks one token too far has another loss."""
    trainee = taught.trainee(depth=2)
    pieces = [Piece(4, 0, 20), Piece(5, 0, 14)]
    batch = taught.texts.batch(pieces, torch.device("cpu"))
    total, weight = trainee.loss(batch)
    names, expected, places = trainee._tokens, 0.0, 0
    embedded = taught.runner.telling.embed(batch.tokens.flatten()).unflatten(0, batch.tokens.shape)
    module = trainee.module
    levels = list(unroll(module.midlayer, embedded, module.enter(batch.states(LAYERS)), 2))
    for row, piece in enumerate(pieces):
        tokens = batch.tokens[row, : piece.length]
        p = taught.model(tokens[None]).logits[0][:, names].detach().softmax(-1)  # [T, Vd]
        for place in range(2, piece.length - 1):
            if int(tokens[place + 1]) not in names.tolist():
                continue
            places += 1
            for level in range(2):
                logits = trainee._logits(module.norm(levels[level][row, place - 1 - level]))
                expected -= 0.8**level * float((p[place] * logits.detach().log_softmax(-1)).sum())
    assert float(total.detach()) == pytest.approx(expected, rel=1e-4)
    assert float(weight) == pytest.approx(1.8 * places)


def test_acceptance_is_counted_along_a_draft(taught: Taught) -> None:
    """A head that always says one token is right up to the first other one in the text."""
    trainee = taught.trainee(depth=3)
    column = 5
    trainee._bias = torch.zeros(DRAFTED)
    trainee._bias[column] = 1e4
    yes, no = int(trainee._tokens[column]), int(trainee._tokens[column + 1])
    tokens = torch.tensor([[0, 0, yes, yes, no, yes, no, 0]])
    answers = torch.tensor([[False, False, True, True, True, True, True, False]])
    batch = Batch(tokens, answers, torch.zeros(1, 8, len(KEPT) * 64), KEPT)
    assert trainee.tally(batch).tolist() == [[5, 3], [3, 1], [1, 0]]
    assert trainee.figures(trainee.tally(batch))["tau"] == pytest.approx(1 + 3 / 5 * (1 + 1 / 3))


def test_a_warm_head_begins_with_the_last_layer(taught: Taught) -> None:
    """Where nothing of the embedding is read, a draft's first level is that layer over the last states."""
    trainee = taught.trainee()
    module = trainee.module
    begin_with(module, taught.model)
    with torch.no_grad():
        for wide in (module.midlayer.self_attn.q_proj, module.midlayer.self_attn.k_proj):
            wide.weight[:, :64] = 0
        module.midlayer.self_attn.v_proj.weight[:, :64] = 0
        told = torch.randn(1, 10, 3 * 64)
        (behind,) = unroll(module.midlayer, torch.randn(1, 10, 64), module.enter(told), 1)
        expected = layer_of(taught, told[..., -64:])
    torch.testing.assert_close(behind, expected, atol=1e-4, rtol=1e-4)


def layer_of(taught: Taught, x: Tensor) -> Tensor:
    base = taught.model.model
    rotation = base.rotary_emb(x, torch.arange(x.shape[1])[None])
    mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
    found = base.layers[-1](x, attention_mask=mask, position_embeddings=rotation)
    return found[0] if isinstance(found, tuple) else found


# Going on -------------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_to_the_same_losses(taught: Taught, data: Path, tmp_path: Path) -> None:
    """A state that is not saved, or batches that come anew, would give others."""
    worker = two_ranks.start(eagle_run.train, data, tmp_path / "killed")
    deadline = time.monotonic() + 60
    while not (files := sorted((tmp_path / "killed").glob("step-*[4-9].pt"))):
        assert time.monotonic() < deadline and worker.is_alive()
        time.sleep(0.01)
    worker.kill()  # SIGKILL
    worker.join()
    assert files
    again = taught.trainer(tmp_path / "killed", steps=10_000)
    begun = again.number
    assert begun >= 4
    whole = [step.loss for step in islice(taught.trainer(tmp_path / "whole", 10_000).steps(), begun + 3)]
    assert [step.loss for step in islice(again.steps(), 3)] == whole[begun:]


def test_two_processes_learn_what_one_does(taught: Taught, data: Path, tmp_path: Path) -> None:
    """Gradients that are averaged over processes instead of places, or the same batch twice, would differ."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    workers = [
        two_ranks.start(eagle_run.share, data, tmp_path / "two", 3, {**place, "RANK": str(rank)})
        for rank in range(2)
    ]
    for worker in workers:
        worker.join(60)
    alone = taught.trainer(tmp_path / "one", steps=3, passes=2)
    losses = [step.loss for step in alone.steps()]
    found = [torch.load(tmp_path / f"two.{rank}") for rank in range(2)]
    assert found[0]["losses"] == found[1]["losses"] == pytest.approx(losses, rel=1e-5)
    for name, x in alone.trainee.module.state_dict().items():
        assert found[0]["module"][name].equal(found[1]["module"][name])
        torch.testing.assert_close(found[0]["module"][name], x, atol=1e-4, rtol=1e-3)


def test_the_module_learns_all_of_itself(taught: Taught) -> None:
    trainee = taught.trainee(own_head=True)
    total, _ = trainee.loss(taught.texts.batch([Piece(1, 0, 30)], torch.device("cpu")))
    total.backward()
    assert isinstance(trainee.module, nn.Module)
    still = [name for name, x in trainee.module.named_parameters() if x.grad is None or not x.grad.any()]
    assert still == []

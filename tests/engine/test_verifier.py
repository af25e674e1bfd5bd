"""The walk: coupled output is plain decoding token for token, whatever was drafted and in any batch."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gammaray.engine import verifier
from gammaray.engine.drafters.base import DraftTree
from gammaray.engine.logits import draw_children, process
from gammaray.engine.verifier import Verdict, VerifyJob, verify
from gammaray.kernels.philox import NoiseKeys, Purpose, gumbel
from gammaray.types import SamplingParams

VOCAB = 8
LENGTH = 10
PROMPT = (1, 2)


@dataclass(frozen=True)
class Markov:
    """A language model that sees the last two tokens."""

    table: torch.Tensor  # [V, V, V]

    @classmethod
    def random(cls, seed: int, scale: float = 1.5) -> "Markov":
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn(VOCAB, VOCAB, VOCAB, generator=generator) * scale)

    def logits(self, tokens) -> torch.Tensor:  # [V]
        return self.table[tokens[-2], tokens[-1]]

    def rows(self, prefix, tree: DraftTree | None) -> torch.Tensor:  # [1 + K, V]
        """What one forward pass over root and tree gives: each node sees the prefix and its ancestors."""
        contexts = [list(prefix)]
        for token, parent in zip(tree.tokens, tree.parents, strict=True) if tree else ():
            contexts.append([*contexts[parent + 1], token])
        return torch.stack([self.logits(context) for context in contexts])


def plain(model: Markov, sampling: SamplingParams, sequence: int) -> list[int]:
    """Seeded plain decoding, written out."""
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + LENGTH:
        logits = model.logits(tokens)[None]
        keys = NoiseKeys.build([sampling.seed], [sequence], [len(tokens)], Purpose.TARGET)
        scores = logits if sampling.greedy else process(logits, [sampling]) + gumbel(keys, VOCAB)
        tokens.append(int(scores.argmax()))
    return tokens


@dataclass(frozen=True)
class Request:
    sampling: SamplingParams
    sequence: int
    drafter: Markov | None
    depth: int
    width: int
    drawn: str
    shared_noise: bool


def sampled_tree(request: Request, prefix) -> DraftTree:
    tokens, parents, ids, probs = [], [], [], []
    frontier = [(-1, list(prefix))]
    for _ in range(request.depth):
        logits = torch.stack([request.drafter.logits(context) for _, context in frontier])
        n = len(frontier)
        drawn, q_ids, q_probs = draw_children(
            process(logits, [request.sampling] * n),
            [request.sampling] * n,
            [request.sequence] * n,
            [len(context) for _, context in frontier],
            request.width,
            request.drawn,
            request.shared_noise,
            range(n),
        )
        grown = []
        for row, (parent, context) in enumerate(frontier):
            for token in drawn[row].tolist():
                grown.append((len(tokens), [*context, token]))
                tokens.append(token)
                parents.append(parent)
                ids.append(q_ids[row])
                probs.append(q_probs[row])
        frontier = grown
    return DraftTree(tuple(tokens), tuple(parents), request.drawn, torch.stack(ids), torch.stack(probs))


def decode(model: Markov, requests: list[Request], trees) -> tuple[list[list[int]], list[Verdict]]:
    """Continuous batching in small: every round verifies all unfinished requests in one call."""
    outputs, verdicts = [list(PROMPT) for _ in requests], []
    while active := [i for i, out in enumerate(outputs) if len(out) < len(PROMPT) + LENGTH]:
        jobs, rows = [], []
        for i in active:
            tree = trees(requests[i], outputs[i])
            jobs.append(
                VerifyJob(tree, requests[i].sampling, requests[i].sequence, len(outputs[i]), "coupled")
            )
            rows.append(model.rows(outputs[i], tree))
        round_verdicts = verify(torch.cat(rows), jobs)
        for i, verdict in zip(active, round_verdicts, strict=True):
            outputs[i].extend(verdict.tokens)
        verdicts += round_verdicts
    return [out[: len(PROMPT) + LENGTH] for out in outputs], verdicts


SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**64 - 1),
)
REQUEST = st.builds(
    Request,
    sampling=SAMPLING,
    sequence=st.integers(0, 3),
    drafter=st.sampled_from([Markov.random(1), Markov.random(2)]),  # 1 is the target itself: long paths
    depth=st.integers(0, 3),
    width=st.integers(1, 3),
    drawn=st.sampled_from(["deterministic", "iid", "without_replacement"]),
    shared_noise=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(REQUEST, min_size=1, max_size=4))
def test_coupled_equals_plain(requests):
    model = Markov.random(1)
    outputs, verdicts = decode(
        model, requests, lambda request, prefix: sampled_tree(request, prefix) if request.depth else None
    )
    assert outputs == [plain(model, request.sampling, request.sequence) for request in requests]
    assert all(len(verdict.tokens) == len(verdict.path) + 1 for verdict in verdicts)


@settings(max_examples=60, deadline=None)
@given(sampling=SAMPLING, data=st.data())
def test_coupled_equals_plain_for_any_tree_at_all(sampling, data):
    """Deterministic drafts may be built, pruned, repeated and ordered at will."""
    nodes = st.lists(st.tuples(st.integers(0, VOCAB - 1), st.integers(-1, 100)), max_size=12)

    def anything(request, prefix):
        drafted = data.draw(nodes)
        parents = tuple(min(parent, i - 1) for i, (_, parent) in enumerate(drafted))
        return DraftTree(tuple(token for token, _ in drafted), parents)

    model, request = Markov.random(3), Request(sampling, 0, None, 0, 1, "deterministic", False)
    outputs, _ = decode(model, [request], anything)
    assert outputs == [plain(model, sampling, 0)]


def test_a_perfect_coupled_drafter_is_always_accepted():
    """Same model, same noise: a drafter that shares the target's stream loses nothing to chance."""
    model = Markov.random(1)
    requests = [Request(SamplingParams(seed=seed), 0, model, 3, 1, "iid", True) for seed in (0, 7, 2**64 - 1)]
    _, verdicts = decode(model, requests, sampled_tree)
    assert all(len(verdict.path) == 3 for verdict in verdicts)


def greedy_job(tree: DraftTree | None) -> VerifyJob:
    return VerifyJob(tree, SamplingParams(temperature=0.0), 0, 5, "rejection")


def one_hot(*tokens: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float()


# A tree of two levels, its nodes 0..4, with tokens:  root -> 3, 4;  3 -> 5, 6;  4 -> 7
TREE = DraftTree((3, 4, 5, 6, 7), (-1, -1, 0, 0, 1))


@pytest.mark.parametrize(
    ("targets", "verdict"),
    [
        ((1, 0, 0, 0, 0, 0), Verdict((), (1,), 1)),
        ((3, 1, 0, 0, 0, 0), Verdict((0,), (3, 1), 2, (0,))),
        ((3, 5, 0, 2, 0, 0), Verdict((0, 2), (3, 5, 2), 2, (0, 0))),
        ((3, 6, 0, 0, 2, 0), Verdict((0, 3), (3, 6, 2), 2, (0, 1))),
        ((4, 0, 7, 0, 0, 6), Verdict((1, 4), (4, 7, 6), 2, (1, 0))),
        ((4, 0, 5, 0, 0, 0), Verdict((1,), (4, 5), 2, (1,))),
    ],
)
def test_walks_by_hand(targets, verdict):
    """Rows: root, then nodes in tree order. Leaves are not tested, second children are but not as first."""
    assert verify(one_hot(*targets), [greedy_job(TREE)]) == [verdict]


def test_plain_rounds_and_empty_trees_emit_one_token():
    jobs = [greedy_job(None), greedy_job(DraftTree((), ())), greedy_job(TREE)]
    verdicts = verify(one_hot(2, 3, 4, 0, 7, 0, 0, 1), jobs)
    assert verdicts == [Verdict((), (2,), 0), Verdict((), (3,), 0), Verdict((1, 4), (4, 7, 1), 2, (1, 0))]
    assert verify(torch.empty(0, VOCAB), []) == []


def test_greedy_ties_take_the_lowest_id():
    """Also where log_softmax would merge two different logits."""
    tied, merged = torch.zeros(1, VOCAB), torch.full((1, VOCAB), 20.0)
    merged[0, 5] = torch.nextafter(merged[0, 5], torch.tensor(torch.inf))
    assert [v.tokens for v in verify(torch.cat([tied, merged]), [greedy_job(None)] * 2)] == [(0,), (5,)]


def rejection_jobs(n: int) -> tuple[torch.Tensor, list[VerifyJob]]:
    """Sampled trees of several kinds and sizes, verified by whichever rule applies."""
    rows, jobs = [], []
    for seed in range(n):
        sampling = SamplingParams(seed=seed, temperature=0.0 if seed % 5 == 4 else 1.0, top_k=seed % 2 * 3)
        drawn = ("iid", "without_replacement", "deterministic")[seed % 3]
        request = Request(sampling, seed, Markov.random(2), 1 + seed % 2, 1 + seed % 3, drawn, False)
        tree = None if seed == 7 else sampled_tree(request, PROMPT)
        rows.append(Markov.random(1).rows(PROMPT, tree))
        jobs.append(VerifyJob(tree, sampling, seed, len(PROMPT), "rejection" if seed % 4 else "coupled"))
    return rows, jobs


def test_a_verdict_does_not_depend_on_the_batch():
    rows, jobs = rejection_jobs(60)
    alone = [verify(row, [job])[0] for row, job in zip(rows, jobs, strict=True)]
    assert verify(torch.cat(rows), jobs) == alone
    assert {len(verdict.path) for verdict in alone} == {0, 1, 2}


def test_noise_of_the_rejection_rule_is_its_own(monkeypatch):
    """A wrong purpose biases the output too little for some p and q to be seen in counts."""
    seen = []

    def spy(name, right):
        def call(first, second):
            keys = first if isinstance(first, NoiseKeys) else second
            purposes, positions = keys.purpose.tolist(), keys.position.tolist()
            seen.extend((name, *place) for place in zip(purposes, positions, strict=True))
            return right(first, second)

        return call

    monkeypatch.setattr(verifier, "uniform", spy("test", verifier.uniform))
    monkeypatch.setattr(verifier.rules, "draw", spy("emit", verifier.rules.draw))
    model = Markov.random(1)
    request = Request(SamplingParams(seed=1), 0, model, 2, 1, "iid", False)  # p = q: both are accepted
    tree = sampled_tree(request, PROMPT)
    verify(model.rows(PROMPT, tree), [VerifyJob(tree, request.sampling, 0, len(PROMPT), "rejection")])
    assert [place for place in seen if place[0] == "test"][:2] == [
        ("test", Purpose.ACCEPT, 2),
        ("test", Purpose.ACCEPT, 3),
    ]
    assert [place for place in seen if place[0] == "emit"] == [("emit", Purpose.RESIDUAL, 4)]


@pytest.mark.parametrize("drawn", ["deterministic", "iid"])
def test_rejection_needs_sampled_children_and_their_q(drawn):
    """Without them a job is verified coupled: its output is plain decoding's."""
    model = Markov.random(1)
    for seed in range(50):
        job = VerifyJob(DraftTree((1,), (-1,), drawn), SamplingParams(seed=seed), 0, len(PROMPT), "rejection")
        tokens = verify(model.rows(PROMPT, job.tree), [job])[0].tokens
        expected = plain(model, job.sampling, 0)[len(PROMPT) :]
        assert list(tokens) == expected[: len(tokens)]


def test_draft_and_target_disagree_on_rows():
    with pytest.raises(AssertionError, match="one row per root and per node"):
        verify(one_hot(1, 2), [greedy_job(TREE)])

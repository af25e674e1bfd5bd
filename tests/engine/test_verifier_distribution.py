"""Chi-square on the joint distribution of the first three tokens, over thousands of seeds.

The same test runs on the right rules, which must pass (p > 1e-3), and on each wrong rule that is known to
creep into speculative decoders, planted into a draft or a step, which must fail (p < 1e-6). Noise is
counter-based, so every result is reproducible. Each test decodes in rounds until three tokens are out,
because errors of a bonus, a residual or a tree may only show in joint counts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import stats

from gammaray.engine.drafters.base import DraftTree
from gammaray.engine.logits import draw_children, process
from gammaray.engine.verifier import VerifyJob, verify
from gammaray.kernels import verify as rules
from gammaray.kernels.philox import NoiseKeys, Purpose, uniform
from gammaray.types import SamplingParams

PROMPT = (0, 0)
HORIZON = 3
DEFAULT = SamplingParams()
TRIALS = 3000


@dataclass(frozen=True)
class Pair:
    """Logits of target and drafter given the last two tokens, each [V, V, V]."""

    target: torch.Tensor
    drafter: torch.Tensor

    @property
    def vocab(self) -> int:
        return self.target.shape[-1]


def context_free(p: list[float], q: list[float]) -> Pair:
    shape = (len(p),) * 3
    return Pair(torch.tensor(p).log().expand(shape), torch.tensor(q).log().expand(shape))


def markov(vocab: int, seed: int) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    tables = torch.randn(2, vocab, vocab, vocab, generator=generator)
    return Pair(tables[0], tables[1])


def among_eight(p: list[float], q: list[float]) -> Pair:
    """A few tokens that matter and rare ones that both models agree on."""
    rare = [0.01] * (8 - len(p))
    return context_free(*([mass * (1 - sum(rare)) for mass in row] + rare for row in (p, q)))


MIXED = markov(8, 0)  # context matters: TV about 0.4
SHARP = among_eight([0.1, 0.2, 0.3, 0.4], [0.55, 0.25, 0.15, 0.05])  # the drafter prefers the wrong end
CLOSE = among_eight([0.19, 0.16, 0.65], [0.02, 0.39, 0.59])  # after a rejection of 1, 2 may be rejected too


@dataclass(frozen=True)
class Shape:
    depth: int
    width: int
    drawn: str

    @property
    def parents(self) -> tuple[int, ...]:
        """Level order: each node of a level has `width` children."""
        starts = np.cumsum([0] + [self.width**level for level in range(1, self.depth + 1)])
        parents = [-1] * self.width
        for level in range(1, self.depth):
            parents += [
                int(starts[level - 1]) + i for i in range(self.width**level) for _ in range(self.width)
            ]
        return tuple(parents)


CHAIN = Shape(3, 1, "iid")
IID = Shape(2, 2, "iid")
RSD = Shape(2, 2, "without_replacement")
ONE = Shape(1, 1, "iid")
IID_3 = Shape(1, 3, "iid")
RSD_2 = Shape(1, 2, "without_replacement")
TOP_2 = Shape(2, 2, "deterministic")

Drafts = list[DraftTree]
Propose = Callable[[Pair, torch.Tensor, list[int], list[SamplingParams], Shape], Drafts]


def propose(pair, contexts, positions, params, shape, coupled=False, draft_params=None) -> Drafts:
    """Sampled trees for N sequences at once, level by level. contexts [N, 2]"""
    n, frontier, levels = len(params), contexts, []
    for depth in range(shape.depth):
        branch = shape.width**depth
        owners = [row for row in range(n) for _ in range(branch)]
        settings = [(draft_params or params)[row] for row in owners]
        tokens, q_ids, q_probs = draw_children(
            process(pair.drafter[frontier[:, 0], frontier[:, 1]], settings),
            settings,
            [0] * len(owners),
            [positions[row] + depth for row in owners],
            shape.width,
            shape.drawn,
            coupled,
            list(range(branch)) * n,
        )
        width = tokens.shape[1]
        levels.append(
            [tokens.view(n, -1)]
            + [q.repeat_interleave(width, 0).view(n, branch * width, -1) for q in (q_ids, q_probs)]
        )
        last = frontier[:, 1].repeat_interleave(width)
        frontier = torch.stack([last, tokens.flatten()], dim=1)
    tokens, q_ids, q_probs = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    return [
        DraftTree(tuple(row), shape.parents, shape.drawn, ids, probs)
        for row, ids, probs in zip(tokens.tolist(), q_ids, q_probs, strict=True)
    ]


def node_contexts(context: list[int], tree: DraftTree) -> list[list[int]]:
    contexts = [context]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        contexts.append([contexts[parent + 1][1], token])
    return contexts


def decode(pair, shape, propose_trees=propose, verification="rejection", sampling=DEFAULT) -> np.ndarray:
    """First HORIZON tokens of TRIALS sequences that differ in their seed alone: [TRIALS, HORIZON]."""
    params = [replace(sampling, seed=seed) for seed in range(TRIALS)]
    out = [list(PROMPT) for _ in params]
    while active := [i for i, tokens in enumerate(out) if len(tokens) < len(PROMPT) + HORIZON]:
        contexts = [out[i][-2:] for i in active]
        positions = [len(out[i]) for i in active]
        settings = [params[i] for i in active]
        trees = propose_trees(pair, torch.tensor(contexts), positions, settings, shape)
        rows = torch.tensor([row for pairs in map(node_contexts, contexts, trees) for row in pairs])
        jobs = [
            VerifyJob(tree, setting, 0, position, verification)
            for tree, setting, position in zip(trees, settings, positions, strict=True)
        ]
        verdicts = verify(pair.target[rows[:, 0], rows[:, 1]], jobs)
        for i, verdict in zip(active, verdicts, strict=True):
            out[i].extend(verdict.tokens)
    return np.array([tokens[len(PROMPT) :][:HORIZON] for tokens in out])


def joint(pair: Pair, sampling: SamplingParams = DEFAULT) -> np.ndarray:
    """The target's own joint distribution of HORIZON = 3 tokens: [V, V, V]."""
    v = pair.vocab
    p = process(pair.target.reshape(-1, v), [sampling] * (v * v)).double().exp().view(v, v, v)
    first, second = p[PROMPT], p[PROMPT[1]]  # p(a), p(b | a)
    return torch.einsum("a,ab,abc->abc", first, second, p).numpy()


def p_value(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of counts against probabilities; cells expected under 5 times are pooled."""
    counts = np.zeros(expected.shape)
    np.add.at(counts, tuple(tokens.T), 1)
    if counts[expected == 0].any():
        return 0.0
    counts, wanted = counts.ravel(), expected.ravel() / expected.sum() * len(tokens)
    small = wanted < 5
    pooled = [np.append(x[~small], x[small].sum()) for x in (counts, wanted)]
    counts, wanted = (x[pooled[1] > 0] for x in pooled)
    return float(stats.chisquare(counts, wanted * counts.sum() / wanted.sum()).pvalue)


def verdict_of(pair, shape, propose_trees=propose, **kwargs) -> float:
    return p_value(decode(pair, shape, propose_trees, **kwargs), joint(pair, kwargs.get("sampling", DEFAULT)))


# --- right rules


@pytest.mark.parametrize("pair", [MIXED, SHARP], ids=["mixed", "sharp"])
@pytest.mark.parametrize(
    "shape",
    [CHAIN, Shape(1, 3, "iid"), IID, Shape(1, 3, "without_replacement"), RSD],
    ids=lambda shape: f"{shape.drawn}-{shape.depth}x{shape.width}",
)
def test_rejection_is_exact(pair, shape):
    assert verdict_of(pair, shape) > 1e-3


@pytest.mark.parametrize("shape", [CHAIN, IID, RSD], ids=["chain", "iid", "without_replacement"])
def test_rejection_is_exact_after_processing(shape):
    sampling = SamplingParams(temperature=0.7, top_k=4, top_p=0.95)
    assert verdict_of(MIXED, shape, sampling=sampling) > 1e-3


def test_coupled_is_exact_over_seeds():
    """One case is enough: test_verifier.py shows that coupled output does not depend on the draft."""
    assert verdict_of(MIXED, RSD, lambda *args: propose(*args, coupled=True), verification="coupled") > 1e-3


def test_children_drawn_with_the_targets_noise_suit_the_rejection_rule_too():
    assert verdict_of(MIXED, RSD, lambda *args: propose(*args, coupled=True)) > 1e-3


# --- drafts that are edited between drawing and verifying


def subset(tree: DraftTree, order: list[int]) -> DraftTree:
    """The nodes `order`, renumbered; a node whose parent is missing goes with it."""
    kept: list[int] = []
    for node in order:
        if tree.parents[node] < 0 or tree.parents[node] in kept:
            kept.append(node)
    where = {-1: -1} | {node: i for i, node in enumerate(kept)}
    return DraftTree(
        tuple(tree.tokens[node] for node in kept),
        tuple(where[tree.parents[node]] for node in kept),
        tree.drawn,
        tree.q_ids[kept],
        tree.q_probs[kept],
    )


def own_q(tree: DraftTree) -> list[float]:
    """q of each node's own drawn token."""
    mine = tree.q_ids == torch.tensor(tree.tokens)[:, None]
    return (tree.q_probs * mine).sum(-1).tolist()


def edited(edit: Callable[[DraftTree], DraftTree], **kwargs) -> Propose:
    return lambda *args: [edit(tree) for tree in propose(*args, **kwargs)]


def stop_after_a_surprise(tree: DraftTree) -> DraftTree:
    """A chain's own tokens may say where drafting *ends*: the surprising token itself stays."""
    surprises = [node for node, q in enumerate(own_q(tree)) if q < 0.3]
    return subset(tree, list(range(len(tree)))[: surprises[0] + 1 if surprises else None])


def drop_by_rank(tree: DraftTree) -> DraftTree:
    return subset(tree, [0, 1, 2, 4])


def relabel(drawn: str) -> Callable[[DraftTree], DraftTree]:
    return lambda tree: replace(tree, drawn=drawn)


def report_truncated_q(tree: DraftTree, renormalise: bool = True) -> DraftTree:
    top = torch.where(torch.arange(tree.q_probs.shape[1]) < 2, tree.q_probs, 0.0)  # q is in descending order
    return replace(tree, q_probs=top / top.sum(-1, keepdim=True) if renormalise else top)


@pytest.mark.parametrize(
    ("shape", "edit"),
    [
        pytest.param(CHAIN, stop_after_a_surprise, id="stop after a drawn token"),
        pytest.param(RSD, drop_by_rank, id="drop nodes by rank"),
        pytest.param(IID_3, relabel("without_replacement"), id="iid as without replacement"),
        pytest.param(CHAIN, report_truncated_q, id="q truncated and renormalised"),
    ],
)
def test_harmless_edits_of_sampled_drafts(shape, edit):
    """What must not break. The last two rest on passing over a child of q(x) = 0 without touching p: when it
    is passed over nothing was tested, and when it is not, it follows the q that it is tested with.
    """
    assert verdict_of(SHARP, shape, edited(edit)) > 1e-3


def merge_duplicates(tree: DraftTree) -> DraftTree:
    first = {
        pair: node for node, pair in reversed(list(enumerate(zip(tree.parents, tree.tokens, strict=True))))
    }
    return subset(tree, sorted(first.values()))


def likeliest_first(tree: DraftTree) -> DraftTree:
    q = own_q(tree)
    return subset(tree, sorted(range(len(tree)), key=lambda node: (tree.parents[node], -q[node])))


def prune_unlikely(tree: DraftTree) -> DraftTree:
    return subset(tree, [node for node, q in enumerate(own_q(tree)) if q > 0.2])


def keep_best_half(tree: DraftTree) -> DraftTree:
    """EAGLE-2's global rerank by cumulative probability, which only deterministic drafts survive."""
    q, score = own_q(tree), []
    for node, parent in enumerate(tree.parents):
        score.append(q[node] * (score[parent] if parent >= 0 else 1.0))
    best = sorted(range(len(tree)), key=lambda node: -score[node])[: len(tree) // 2]
    return subset(tree, sorted(best))


def truncate_before_a_surprise(tree: DraftTree) -> DraftTree:
    surprises = [node for node, q in enumerate(own_q(tree)) if q < 0.3]
    return subset(tree, list(range(len(tree)))[: surprises[0] if surprises else None])


def report_colder_q(tree: DraftTree) -> DraftTree:
    return replace(tree, q_probs=tree.q_probs.log().mul(1.5).softmax(-1))


def report_unnormalised_q(tree: DraftTree) -> DraftTree:
    return report_truncated_q(tree, renormalise=False)


def draw_truncated_report_full(pair, contexts, positions, params, shape) -> Drafts:
    """The drafter applied top_k to what it drew, and sent its whole softmax."""
    truncated = [replace(setting, top_k=2) for setting in params]
    trees = propose(pair, contexts, positions, params, shape, draft_params=truncated)
    q = pair.drafter[0, 0].softmax(-1).expand(len(shape.parents), -1)  # context_free pairs only
    return [replace(tree, q_ids=torch.arange(pair.vocab).expand_as(q), q_probs=q) for tree in trees]


def noise_of(purpose: Purpose) -> Propose:
    """Chains of one token, drawn with the verifier's noise: inverse CDF (ACCEPT), Gumbel-max (RESIDUAL)."""

    def drafts(pair, contexts, positions, params, shape) -> Drafts:
        q = pair.drafter[contexts[:, 0], contexts[:, 1]].softmax(-1)
        keys = NoiseKeys.build([row.seed for row in params], [0] * len(params), positions, purpose)
        by_cdf = torch.searchsorted(q.cumsum(-1), uniform(keys, 1)).clamp_max(pair.vocab - 1)[:, 0]
        tokens = by_cdf if purpose is Purpose.ACCEPT else rules.draw(q.log(), keys)
        ids = torch.arange(pair.vocab)[None]
        return [DraftTree((x,), (-1,), "iid", ids, q[i : i + 1]) for i, x in enumerate(tokens.tolist())]

    return drafts


@pytest.mark.parametrize(
    ("shape", "drafts"),
    [
        pytest.param(RSD, edited(relabel("iid")), id="without replacement verified as iid"),
        pytest.param(TOP_2, edited(relabel("without_replacement")), id="top-k verified with q"),
        pytest.param(TOP_2, edited(relabel("iid")), id="top-k verified with q as iid"),
        pytest.param(IID_3, edited(merge_duplicates), id="merged duplicates"),
        pytest.param(IID_3, edited(likeliest_first), id="iid siblings sorted"),
        pytest.param(RSD_2, edited(likeliest_first), id="siblings without replacement sorted"),
        pytest.param(CHAIN, edited(report_colder_q), id="q reported at another temperature"),
        pytest.param(CHAIN, edited(report_unnormalised_q), id="q reported truncated and not renormalised"),
        pytest.param(CHAIN, draw_truncated_report_full, id="q reported whole, drawn truncated"),
        pytest.param(CHAIN, edited(prune_unlikely), id="sampled chain pruned by its tokens"),
        pytest.param(RSD, edited(prune_unlikely), id="sampled tree pruned by its tokens"),
        pytest.param(RSD_2, edited(keep_best_half), id="sampled tree reranked and shrunk"),
        pytest.param(CHAIN, edited(truncate_before_a_surprise), id="sampled chain truncated by its tokens"),
        pytest.param(ONE, noise_of(Purpose.ACCEPT), id="acceptance uniform shared with the draft"),
    ],
)
def test_wrong_drafts_are_seen(shape, drafts):
    assert verdict_of(SHARP, shape, drafts) < 1e-6


def test_residual_noise_shared_with_the_draft_is_seen():
    assert verdict_of(CLOSE, ONE, noise_of(Purpose.RESIDUAL)) < 1e-6


def report_q_in_eight_bits(tree: DraftTree) -> DraftTree:
    """Another dtype than q was drawn in, and coarse enough to show: two bits of mantissa."""
    return replace(tree, q_probs=tree.q_probs.to(torch.float8_e5m2).float())


def test_q_reported_in_another_dtype_is_seen():
    """0.555 becomes 0.5, so that a token the drafter overrates is always accepted."""
    pair = context_free([0.5, 0.488] + [0.002] * 6, [0.555, 0.433] + [0.002] * 6)
    assert verdict_of(pair, CHAIN) > 1e-3
    assert verdict_of(pair, CHAIN, edited(report_q_in_eight_bits)) < 1e-6


# --- wrong steps


def plain_p_on_rejection(p, q_ids, q_probs):
    return p


def typical_acceptance(p_x, q_x, u):
    """Medusa's criterion (arXiv 2401.10774) with its threshold alone."""
    return p_x > 0.15


def one_uniform_for_all_siblings(logprobs, children, uniforms, right=rules.try_children):
    return right(logprobs, children, uniforms[:, :1].expand_as(uniforms))


def bonus_from_a_residual(logprobs, children, uniforms, right=rules.try_children):
    chosen, p = right(logprobs, children, uniforms)
    leaf = (children.tokens < 0).all(-1, keepdim=True)
    q = SHARP.drafter[0, 0].softmax(-1).expand_as(p)
    return chosen, torch.where(leaf, rules.residual(p, torch.arange(SHARP.vocab).expand_as(p), q), p)


def residual_without_norm(p, q_ids, q_probs):
    return p.scatter_add(1, q_ids, -q_probs).clamp_min(0.0)


def duplicates_count_as_rejected(q_probs, q_ids, x, right=rules.without):
    return right(q_probs, q_ids, x) + torch.where(q_ids == x, 1e-30, 0.0)


@pytest.mark.parametrize(
    ("pair", "shape", "name", "wrong"),
    [
        pytest.param(SHARP, ONE, "try_children", bonus_from_a_residual, id="bonus drawn from a residual"),
        pytest.param(SHARP, CHAIN, "residual", plain_p_on_rejection, id="chain: plain p on rejection"),
        pytest.param(SHARP, RSD, "residual", plain_p_on_rejection, id="tree: plain p on rejection"),
        pytest.param(SHARP, RSD, "residual", residual_without_norm, id="residual not normalised"),
        pytest.param(
            CLOSE, IID_3, "try_children", one_uniform_for_all_siblings, id="iid: one uniform for all"
        ),
        pytest.param(CLOSE, RSD_2, "try_children", one_uniform_for_all_siblings, id="one uniform for all"),
        pytest.param(SHARP, CHAIN, "accepts", typical_acceptance, id="typical acceptance"),
    ],
)
def test_wrong_steps_are_seen(pair, shape, name, wrong, monkeypatch):
    monkeypatch.setattr(rules, name, wrong)
    assert verdict_of(pair, shape) < 1e-6


def test_iid_as_without_replacement_is_wrong_once_a_duplicate_counts_as_rejected(monkeypatch):
    monkeypatch.setattr(rules, "without", duplicates_count_as_rejected)
    assert verdict_of(SHARP, IID_3, edited(relabel("without_replacement"))) < 1e-6


@pytest.mark.parametrize("shape", [IID_3, RSD_2], ids=["iid", "without_replacement"])
def test_rejection_is_exact_for_the_close_pair_too(shape):
    """So that the failures of this pair above are the planted rule's."""
    assert verdict_of(CLOSE, shape) > 1e-3

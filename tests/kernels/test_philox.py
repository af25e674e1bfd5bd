"""Noise: the published stream, its precision at both ends, and independence of rows from their batch."""

import math

import pytest
import torch
from scipy import stats

from gammaray.kernels.philox import NoiseKeys, Purpose, gumbel, gumbel_at, philox, uniform


def words(text: str) -> list[torch.Tensor]:
    return [torch.tensor(int(word, 16)) for word in text.split()]


def one(
    seed: int = 1, sequence: int = 0, position: int = 0, purpose: Purpose = Purpose.TARGET, rank: int = 0
):
    return NoiseKeys.build([seed], [sequence], [position], purpose, [rank])


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123 1.14, known-answer vectors, "philox4x32 10"
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter, key, expected):
    assert philox(tuple(words(counter)), tuple(words(key))) == tuple(words(expected))


def test_layout_of_the_stream():
    """Key = seed halves; counter = (token // 4, position, sequence, purpose + 256 rank); word = token % 4."""
    keys = NoiseKeys.build([0xFEDCBA9876543210], [5], [7], Purpose.DRAFT, [2])
    block = philox(
        tuple(torch.tensor(word) for word in (3, 7, 5, 3 + 512)),
        (torch.tensor(0x76543210), torch.tensor(0xFEDCBA98)),
    )
    expected = [(int(word) + 0.5) * 2.0**-32 for word in block]
    assert uniform(keys, 16)[0, 12:].tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1, -1])
def test_any_64_bit_seed(seed):
    assert torch.equal(uniform(one(seed), 9), uniform(one(seed % 2**64), 9))
    assert not torch.equal(uniform(one(seed), 9), uniform(one(seed ^ (1 << 62)), 9))


def test_every_part_of_the_key_matters():
    rows = [one(), one(seed=2), one(seed=1 + 2**32), one(sequence=1), one(position=1), one(rank=1)]
    rows += [one(purpose=purpose) for purpose in Purpose if purpose is not Purpose.TARGET]
    assert len({tuple(uniform(row, 4)[0].tolist()) for row in rows}) == len(rows)


@pytest.mark.parametrize("vocab", [1, 3, 8, 1001, 49152])
def test_a_row_does_not_depend_on_its_batch(vocab):
    seeds, positions = [3, 2**63 + 5, 11], [0, 9, 70000]
    together = gumbel(NoiseKeys.build(seeds, [0, 1, 2], positions, Purpose.TARGET), vocab)
    for row in range(3):
        alone = gumbel(NoiseKeys.build(seeds[row:][:1], [row], positions[row:][:1], Purpose.TARGET), vocab)
        assert torch.equal(together[row : row + 1], alone)


def test_noise_of_chosen_tokens_is_noise_of_the_row():
    keys = NoiseKeys.build([3, 4], [0, 0], [1, 2], Purpose.TARGET)
    tokens = torch.tensor([[0, 49151, 7, 7, 1234], [5, 4, 3, 2, 1]])
    assert torch.equal(gumbel_at(keys, tokens), gumbel(keys, 49152).gather(1, tokens))


@pytest.mark.parametrize(("word", "u"), [(0, 2.0**-33), (1, 1.5 * 2.0**-32), (2**32 - 1, 1 - 2.0**-24)])
def test_both_ends_stay_finite(monkeypatch, word, u):
    """The smallest E decides whether rare tokens win: it must keep all 32 bits, and none may become inf."""
    monkeypatch.setattr("gammaray.kernels.philox.philox", lambda *_: (torch.tensor([[word]]),) * 4)
    assert uniform(one(), 1).item() == u
    expected = -math.log(-math.log1p(-u))
    assert gumbel(one(), 1).item() == pytest.approx(expected, rel=1e-6)


def test_distributions():
    keys = NoiseKeys.build(range(40), [0] * 40, [0] * 40, Purpose.TARGET)
    assert stats.kstest(uniform(keys, 5000).flatten().numpy(), "uniform").pvalue > 1e-3
    assert stats.kstest(gumbel(keys, 5000).flatten().numpy(), "gumbel_r").pvalue > 1e-3


def test_rare_tokens_win_as_often_as_they_should():
    """A token of probability 2^-12 against its complement, 2^20 draws: about 256 wins."""
    trials = 2**20
    noise = gumbel(one(seed=9), 2 * trials).view(trials, 2)
    wins = (noise + torch.tensor([2.0**-12, 1 - 2.0**-12]).log()).argmax(-1).eq(0).sum().item()
    assert stats.binomtest(wins, trials, 2.0**-12).pvalue > 1e-3

"""The error tree crosses processes and keeps what it says."""

from __future__ import annotations

import pickle

import pytest

from gammaray import errors
from gammaray.errors import GammarayError, InvalidRequest, Overloaded, VocabularyMismatch

EXAMPLES = [
    InvalidRequest("wrong", param="n", code="bad"),
    errors.TooLarge("too much", param="body"),
    errors.Unprocessable("no template", param="messages"),
    errors.Unauthorized("no key", code="invalid_api_key"),
    errors.Forbidden("not yours"),
    errors.NotFound("none"),
    errors.TimedOut("over", param="timeout"),
    Overloaded("full", retry_after=2.5),
    errors.RateLimited("slow down", retry_after=3.0, code="requests_per_minute"),
    errors.ReplicaLost("gone", retry_after=5.0),
    errors.EngineFailure("broke"),
    errors.StateMismatch("target KV", "r/0", 3, 7, 0.5),
    errors.ConfigError("bad"),
    errors.ModelUnsupported("no"),
    VocabularyMismatch(10, 20, "small"),
]


def test_examples_are_all_of_the_tree() -> None:
    def leaves(cls: type) -> set[type]:
        return {cls}.union(*(leaves(sub) for sub in cls.__subclasses__()))

    assert {type(example) for example in EXAMPLES} == leaves(GammarayError) - {GammarayError}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_pickling_keeps_everything(error: GammarayError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error) == error.message
    assert again.__dict__ == error.__dict__


def test_vocabulary_mismatch_names_both_sizes() -> None:
    assert "20 tokens" in str(VocabularyMismatch(10, 20, "small"))
    assert "10" in str(VocabularyMismatch(10, 20, "small"))


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (InvalidRequest, 400),
        (errors.Unauthorized, 401),
        (errors.Forbidden, 403),
        (errors.NotFound, 404),
        (errors.TimedOut, 408),
        (errors.TooLarge, 413),
        (errors.Unprocessable, 422),
        (errors.RateLimited, 429),
        (errors.EngineFailure, 500),
        (Overloaded, 503),
        (errors.ReplicaLost, 503),
    ],
)
def test_statuses(kind: type[GammarayError], status: int) -> None:
    assert kind.status == status

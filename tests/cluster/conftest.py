"""One Ray cluster for all tests of this folder, started by the code that production starts it with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import serving

from gammaray.config import parse


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """This process can be in one Ray cluster at a time: tests with another one than `cluster` come first."""
    items.sort(key=lambda item: "cluster" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Cluster]:
    import ray

    from gammaray.cluster.run import running

    ray.cloudpickle.register_pickle_by_value(serving)  # workers cannot import it
    log = tmp_path_factory.mktemp("engine") / "log"
    config = parse({"target": {"model": "tiny"}, "server": {"port": serving.free_port()}}, "test")
    with running(
        config,
        engine_factory=lambda *_: serving.SlowEngine(log),
        tokenizer_factory=lambda _: serving.ByteTokenizer(),
    ) as url:
        yield serving.Cluster(url, log)
    assert log.read_text().endswith("shut down\n")

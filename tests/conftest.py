"""Set before torch, ray, transformers or triton is imported: each reads its variables once, at import."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # the same sums on every machine, and no stalls when cores are shared
    "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home folder
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps every Ray listener on 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_INTERPRET": "1",  # kernels run on the CPU; torch imports Triton where nobody expects it
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

settings.register_profile("gammaray", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("gammaray")


@pytest.fixture(scope="session", autouse=True)
def _folder_of_all_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Made before a test moves the folder of temporary files, with which it would go."""
    tmp_path_factory.getbasetemp()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Data that several checkouts share, in a folder beside this one; not part of the repository."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("needs the folder ../shared beside the checkout, which is absent")
    return folder

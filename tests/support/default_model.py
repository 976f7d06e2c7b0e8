"""The default model for tests that need real weights or a real vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegainfer.app.cache import cached_model
from pegainfer.runtime.user_cache import cache_folder


def default_model() -> Path:
    """Its .gguf file in the cache; skips the test where it is not there."""
    path = cached_model()
    if path is None:
        pytest.skip(f"the default model is not in {cache_folder()}: run `pegainfer pull`")
    return path

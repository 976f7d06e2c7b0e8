"""NIXL is not among the test tools: its package brings PyTorch, some gigabytes that nothing here imports."""

from __future__ import annotations

import importlib.util

import pytest


def needs_nixl() -> None:
    """Skips the test where NIXL is not installed."""
    if not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu13")):
        pytest.skip("NIXL is not installed: pip install --no-deps nixl-cu13")

"""Marks every test by the directory it lives in, so that `-m null` and the directory say the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run, and no time limit on one: machines that run the tests are shared.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile("steady")

KINDS = ("null", "cpu", "gpu", "multi", "e2e")
TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        kind = item.path.relative_to(TESTS).parts[0]
        if kind in KINDS:
            item.add_marker(getattr(pytest.mark, kind))

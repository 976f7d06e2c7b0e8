"""Marks every test by the directory it lives in, and gives the kinds with processes or kernels more time."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run, and no time limit on one: machines that run the tests are shared.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile("steady")

TESTS = Path(__file__).parent
# Directory -> seconds that one of its tests may take; the machine may be busy with others.
KINDS = {"null": 120, "cpu": 300, "neon": 300, "gpu": 300, "multi": 300, "e2e": 300}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        kind = item.path.relative_to(TESTS).parts[0]
        if kind in KINDS:
            item.add_marker(getattr(pytest.mark, kind))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(KINDS[kind]))

"""Marks every test by the directory it lives in, and gives the kinds with processes or kernels more time."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import settings

# A background job of a shell inherits an ignored SIGINT, and so would every process that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and no time limit on one: machines that run the tests are shared.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile("steady")

TESTS = Path(__file__).parent
# Directory -> seconds that one of its tests may take; the machine may be busy with others.
KINDS = {
    "null": 120, "cpu": 300, "cubins": 120, "neon": 300, "gpu": 300, "multi": 300, "e2e": 300, "browser": 120,
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run tests that take minutes on a GPU as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") is not None and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes on a GPU: --long runs it"))
        kind = item.path.relative_to(TESTS).parts[0]
        if kind in KINDS:
            item.add_marker(getattr(pytest.mark, kind))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(KINDS[kind]))

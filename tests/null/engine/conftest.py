"""Collects what the random scenarios did, and prints it after the run."""

from __future__ import annotations

from collections import Counter

import pytest

COUNTS = pytest.StashKey[Counter[str]]()


@pytest.fixture
def soak_counts(request: pytest.FixtureRequest) -> Counter[str]:
    return request.config.stash.setdefault(COUNTS, Counter())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash.get(COUNTS, None)
    if counts:
        terminalreporter.section("random scenarios on the null device")
        for name, value in sorted(counts.items()):
            terminalreporter.write_line(f"{name:24} {value:>12,}")

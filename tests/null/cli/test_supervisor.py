from __future__ import annotations

import pytest

from pegainfer.cli.supervisor import describe_end


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exit code 0"), (1, "exit code 1"), (-9, "signal 9 (SIGKILL)"), (-11, "signal 11 (SIGSEGV)"),
     (-63, "signal 63")],
)  # fmt: skip
def test_how_a_process_ended_in_words(code: int, text: str) -> None:
    assert describe_end(code) == text

"""The programs of docs/python.md run as they stand there, on the default model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.default_model import default_model

PAGE = Path(__file__).parents[3] / "docs" / "python.md"


def run(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_pages_programs() -> None:
    default_model()
    offline, streaming = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = run(offline)
    assert [line.split("'")[1] for line in lines[:3]] == [
        "Hello, my name is", "The capital of France is", "The future of AI is",
    ]  # fmt: skip
    assert lines[3] == "3 vectors of 576 numbers"  # the model's hidden size
    assert "Paris" in "".join(run(streaming))

"""The programs of docs/python.md run as they stand there, on the default model."""

from __future__ import annotations

import json
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
    offline, structured, streaming = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = run(offline)
    assert [line.split("'")[1] for line in lines[:3]] == [
        "Hello, my name is", "The capital of France is", "The future of AI is",
    ]  # fmt: skip
    assert lines[3] == "3 vectors of 576 numbers"  # the model's hidden size
    lines = run(structured)
    assert lines[0] in ("Positive", "Negative")
    assert list(json.loads(lines[1])) == ["city"]
    first, second = json.loads(lines[2])
    assert 0 < second < first < 1
    assert lines[3] == lines[1]  # the same after a sleep
    assert "Paris" in "".join(run(streaming))

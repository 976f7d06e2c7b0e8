"""The programs in examples/ run as they stand there, on the default model."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pegainfer
from tests.support.default_model import default_model

EXAMPLES = Path(__file__).parents[3] / "examples"
PROGRAMS = sorted(EXAMPLES.glob("*.py"))


def run(name: str) -> str:
    default_model()
    program = str(EXAMPLES / f"{name}.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_basic() -> None:
    said = run("offline_basic")
    assert len(re.findall(r"^Prompt:    '.+'\nOutput:    ['\"].+['\"]$", said, re.MULTILINE)) == 4


def test_chat() -> None:
    said = run("offline_chat")
    assert "Generated text: " in said and "Paris" in said
    assert said.endswith("4 answers, 1 different\n")


def test_structured_output() -> None:
    said = dict(line.split(": ", 1) for line in run("offline_structured_output").splitlines())
    assert list(said) == ["Choice", "Regex", "JSON", "Grammar"]
    assert said["Choice"] in ("Positive", "Negative")
    assert re.fullmatch(r"[a-z0-9.]{1,20}@\w{6,10}\.com", said["Regex"])
    car = json.loads(said["JSON"])
    assert set(car) == {"brand", "model", "car_type"} and car["car_type"] in (
        "sedan",
        "SUV",
        "truck",
        "coupe",
    )
    assert re.fullmatch(r"SELECT col_[12]  from table_[12]  where col_[12] = [12]", said["Grammar"])


def test_embedding() -> None:
    said = run("offline_embedding").splitlines()
    assert len(said) == 4 and all(line.endswith("(size=576)") for line in said)
    vectors = [line.partition("Embedding: ")[2] for line in said]
    assert len(set(vectors)) == 4


def test_async_streaming() -> None:
    answers = run("offline_async_streaming").split("Prompt: ")[1:]
    assert len(answers) == 3
    for answer in answers:
        text = answer.partition("Answer: ")[2]
        assert len(text) > 60 and text.rstrip().endswith("finished")


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.stem)
def test_programs_import_names_of_the_public_api_alone(path: Path) -> None:
    """So that a program of another engine with this API needs another import, and nothing else."""
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    names = [name.name for node in imports if node.module == "pegainfer" for name in node.names]
    assert names and set(names) <= set(pegainfer.__all__)
    assert all(not (node.module or "").startswith("pegainfer.") for node in imports)

"""What the README and pages beside it tell people to type does what it says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.default_model import default_model
from tests.support.server import Server, pega, serving

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
PORT = ":8000"  # the README's; the tests' server takes a free one


def blocks(language: str = "") -> list[str]:
    """Fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def the_block(language: str, word: str) -> str:
    (found,) = (block for block in blocks(language) if word in block)
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    default_model()
    (flags,) = re.findall(r"^pegainfer serve(.*)$", README, re.MULTILINE)
    with serving(*flags.split()) as running:
        yield running


def test_the_two_commands_stand_on_top_and_are_targets_of_the_makefile() -> None:
    first = [line.split("#")[0].split() for line in blocks()[0].splitlines()]
    assert first == [["make", "run"], ["make", "test"]]
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"run", "test", "check", "golden", "bench", "clean"} <= set(targets)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: Server) -> None:
    script = the_block("", "curl").replace(PORT, f":{server.port}")
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    chat, stream = done.stdout.split("\n", 1) if "\n" in done.stdout else done.stdout.split("data: ", 1)
    assert "Paris" in chat
    assert stream.rstrip().endswith("data: [DONE]")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_example_of_structured_output(server: Server) -> None:
    page = (ROOT / "docs" / "structured-output.md").read_text()
    script = page.split("```")[1].strip().replace(PORT, f":{server.port}")
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=120)
    choice = json.loads(done.stdout)["choices"][0]
    person = json.loads(choice["message"]["content"])
    assert (list(person), choice["finish_reason"]) == (["name", "age"], "stop")
    assert re.fullmatch(r"[A-Z][a-z]+", person["name"]) and person["age"] in range(121)


def test_the_openai_client(server: Server) -> None:
    code = the_block("python", "from openai").replace(PORT, f":{server.port}")
    assert "Paris" in run_python(code)


def test_the_offline_api() -> None:
    default_model()
    assert "Paris" in run_python(the_block("python", "from pegainfer"))


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_command_that_is_named_exists() -> None:
    named = set(re.findall(r"`pegainfer ((?:bench )?[a-z][a-z-]*)", README))
    assert named >= {"serve", "generate", "pull", "doctor", "bench engine"}
    tour = pega("--help").stdout
    for command in sorted(named):
        assert command.split()[0] in tour
        assert pega(*command.split(), "--help").stdout.startswith(f"Usage: pegainfer {command}")


def test_generate_answers_in_the_terminal() -> None:
    default_model()
    done = pega("generate", "What is the capital of France?", "--activation-dtype", "f32")
    assert done.returncode == 0
    assert "Paris" in done.stdout
    assert re.fullmatch(r"\[\d+ prompt tokens in [\d.]+ s, \d+ tokens at [\d.]+ tokens/s\]\n", done.stderr)

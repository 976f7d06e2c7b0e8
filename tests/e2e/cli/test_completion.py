"""What a shell is told when the user asks how a command line goes on."""

from __future__ import annotations

import pytest

from tests.support.default_model import default_model
from tests.support.server import pega


def completed(line: str) -> list[str]:
    """As bash asks it, with the cursor behind the line."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_PEGAINFER_COMPLETE": "complete_bash"}
    done = pega(**words)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pegainfer li", ["list"]),
        ("pegainfer bench ", ["engine", "ops", "perplexity", "startup", "load", "tiers", "serve"]),
        ("pegainfer serve --max-mo", ["--max-model-len"]),
        ("pegainfer serve --device c", ["cpu", "cuda"]),
        # A flag that would be refused is the command's affair, not the completion's.
        ("pegainfer serve --tensor-parallel-size 4 --generation-config ", ["none", "auto"]),
    ],
)
def test_commands_flags_and_values(line: str, expected: list[str]) -> None:
    assert completed(line) == expected


def test_cached_models() -> None:
    default_model()
    assert completed("pegainfer show Smol") == ["SmolLM2-135M-Instruct"]


def test_a_script_for_the_shell() -> None:
    done = pega("--show-completion", "bash")
    assert done.returncode == 0 and "complete -o default -F" in done.stdout

"""show with the default model, and ps beside real servers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.support.default_model import default_model
from tests.support.server import pega, serving


def test_show_the_default_model() -> None:
    default_model()
    shown = json.loads(pega("show", "--json").stdout)
    assert shown["name"] == "SmolLM2-135M-Instruct"
    assert (shown["architecture"], shown["parameters"], shown["context"]) == (
        "LlamaForCausalLM",
        134515008,
        8192,
    )
    assert shown["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 4  # layers, K and V, heads, head size, f32
    assert shown["formats"] == {"q4_1": 66355200, "q8_0": 30081024, "f32": 140544}
    text = pega("show").stdout
    assert "parameters" in text and "134.5 million" in text


def test_show_does_not_fetch(tmp_path: Path) -> None:
    done = pega("show", "owner/model", HF_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "the model was not fetched before" in done.stderr


def test_running_servers(tmp_path: Path) -> None:
    home = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert pega("ps", **home).stdout == "no server runs here\n"
    with (
        serving("--device", "null", "--served-model-name", "first", **home) as first,
        serving("--device", "null", "--served-model-name", "second", "-a", "other", **home) as second,
    ):
        rows = json.loads(pega("ps", "--json", **home).stdout)
        assert [(r["pid"], r["url"], r["models"]) for r in rows] == [
            (first.process.pid, first.url, ["first"]),
            (second.process.pid, second.url, ["second", "other"]),
        ]
        # Two Python processes each: more than one of them alone takes.
        assert all(40 << 20 < r["memory_bytes"] < 1 << 30 for r in rows)
        lines = pega("ps", **home).stdout.splitlines()
        assert lines[0].split() == ["PID", "MODELS", "URL", "MEMORY", "UP", "DEVICE"]
        assert lines[2].split()[1:3] == ["second", "other"]
        assert first.stop() == 0
        os.kill(second.process.pid, signal.SIGKILL)  # it cannot tidy up
        second.process.wait()
        assert pega("ps", **home).stdout == "no server runs here\n"
    assert list((tmp_path / "pegainfer").iterdir()) == []

"""`pegainfer run-batch` as a process: interrupted, it goes on."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.support.server import CLI, pega


def write_input(path: Path, count: int, tokens: int) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "ignore_eos": True}
    requests = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in requests))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_batch_that_is_interrupted_goes_on(tmp_path: Path, number: int, code: int) -> None:
    given, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_input(given, 150, 100)
    command = ["run-batch", "--device", "null", "-i", str(given), "-o", str(answers), "--concurrency", "4"]
    process = subprocess.Popen([*CLI, *command], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for text in process.stderr:
        if text.startswith("answering (5 %)"):
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            break
    process.stderr.read()
    assert process.wait(60) == code
    assert psutil.wait_procs(children, timeout=60)[1] == []  # the engine goes with it, however it went
    kept = len(answers.read_text().splitlines())
    assert 0 < kept < 150
    again = pega(*command)
    assert again.returncode == 0, again.stderr
    assert again.stderr.splitlines()[-1] == (
        f"150 requests: {150 - kept} answered, 0 failed, {kept} from an earlier run"
    )
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(a["custom_id"] for a in lines) == sorted(f"r{i}" for i in range(150))
    assert all(a["response"]["body"]["usage"]["completion_tokens"] == 100 for a in lines)


def test_faults_of_the_command_line(tmp_path: Path) -> None:
    given = tmp_path / "in.jsonl"
    for argv, said in (
        (["-i", str(given), "-o", str(tmp_path / "out")], "cannot read the input"),
        (["-i", str(given)], "output"),
        (["-i", str(given), "-o", str(given), "--concurrency", "0"], "concurrency"),
    ):
        ended = pega("run-batch", "--device", "null", *argv)
        assert ended.returncode == 2 and said in ended.stderr
    write_input(given, 1, 1)
    ended = pega("run-batch", "--device", "null", "-i", str(given), "-o", str(given))
    assert ended.returncode == 2 and "overwrite the input" in ended.stderr

"""A model folder in Hugging Face's form, and the same model as GGUF, from the command line to the answer."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from pegainfer.app.offline import LLM
from pegainfer.app.sampling_params import SamplingParams
from tests.support.servedqwen3 import write_served_folder, write_served_gguf
from tests.support.server import pega, serving

PROMPT = "the quick brown fox"
TOKENS = 24


@pytest.fixture(params=["folder", "gguf"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "folder":
        return write_served_folder(tmp_path / "qwen3-tiny")
    return write_served_gguf(tmp_path / "qwen3-tiny.gguf")


def offline(model: Path, chat: bool) -> str:
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    with LLM(str(model)) as llm:
        if chat:
            (output,) = llm.chat([{"role": "user", "content": PROMPT}], params, use_tqdm=False)
        else:
            (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    return str(output.outputs[0].text)


def test_generate_answers_in_the_models_chat_format(model: Path) -> None:
    wanted = offline(model, chat=True)
    done = pega("generate", "--model", str(model), PROMPT, "--max-tokens", str(TOKENS))
    assert done.returncode == 0, done.stderr
    printed = wanted.replace("\r\n", "\n").replace("\r", "\n")  # as Python reads the output of a process
    assert done.stdout.strip() == printed.strip()
    assert wanted.strip()


def test_serve_answers_as_the_offline_model(model: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    messages = [{"role": "user", "content": PROMPT}]
    with serving("--model-path", str(model)) as server:
        (listed,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert listed["id"] == "qwen3-tiny"
        text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        chat_body = {"messages": messages, "max_tokens": TOKENS, "temperature": 0}
        chat = httpx.post(f"{server.url}/v1/chat/completions", json=chat_body, timeout=60).json()
        assert server.stop() == 0
    assert text["choices"][0]["text"] == offline(model, chat=False)
    assert chat["choices"][0]["message"]["content"] == offline(model, chat=True)

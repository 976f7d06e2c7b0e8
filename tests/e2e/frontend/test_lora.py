"""A real server with LoRA adapters: loaded at its start and by request, in answers, and after a crash."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servedqwen3 import SERVED, write_served_folder
from tests.support.server import CLI, serving
from tests.support.tinylora import ADAPTERS, write_adapter

FLAGS = ("--enable-lora", "--max-loras", "2", "--admin-key", "admin", "--activation-dtype", "f32")
ADMIN = {"authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lora")
    write_served_folder(made / "model")
    for name, adapter in ADAPTERS.items():
        write_adapter(adapter, SERVED, made / "adapters" / name)
    write_adapter(ADAPTERS["plain"], SERVED, made / "adapters" / "dora", use_dora=True)
    return made


def answer(url: str, model: str) -> str:
    body: dict[str, Any] = {"model": model, "prompt": "The capital of France", "max_tokens": 12,
                            "temperature": 0, "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    found = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert found.status_code == 200 and found.json()["model"] == model
    return str(found.json()["choices"][0]["token_ids"])


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def names(url: str) -> list[str]:
    return [m["id"] for m in httpx.get(f"{url}/v1/models").json()["data"]]


def test_adapters_are_loaded_used_kept_over_a_crash_and_unloaded(folder: Path) -> None:
    root = folder / "adapters"
    flags = (*FLAGS, "--lora-modules", f"one={root / 'plain'}", "--lora-root", str(root))
    with serving(str(folder / "model"), *flags) as server:
        url = server.url
        assert names(url) == ["model", "one"]
        base, one = answer(url, "model"), answer(url, "one")

        def load(name: str, path: str) -> httpx.Response:
            body = {"lora_name": name, "lora_path": path}
            return httpx.post(f"{url}/v1/load_lora_adapter", json=body, headers=ADMIN, timeout=60)

        dora = load("dora", "dora")
        assert dora.status_code == 400 and "use_dora is not supported" in dora.json()["error"]["message"]
        assert load("two", "embedding_and_head").status_code == 200
        two = answer(url, "two")
        assert len({base, one, two}) == 3
        taken = load("two", "layer_0_without_k")
        assert taken.status_code == 400 and taken.json()["error"]["param"] == "lora_name"

        os.kill(server.children()[0], signal.SIGKILL)
        until(lambda: httpx.get(f"{url}/health").status_code == 503)
        until(lambda: httpx.get(f"{url}/health").status_code == 200)
        until(lambda: sorted(names(url)) == ["model", "one", "two"])
        assert [answer(url, name) for name in ("model", "one", "two")] == [base, one, two]

        unload = {"json": {"lora_name": "one"}, "headers": ADMIN}
        assert httpx.post(f"{url}/v1/unload_lora_adapter", **unload).status_code == 200  # type: ignore[arg-type]
        assert names(url) == ["model", "two"]
        gone = httpx.post(f"{url}/v1/completions", json={"model": "one", "prompt": "x"})
        assert gone.status_code == 404


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--lora-modules", "x=/nowhere"), "serves no adapters"),
        (("--enable-lora", "--lora-modules", "x=/nowhere"), "cannot read file"),
        (("--enable-lora", "--lora-modules", "nothing"), "--lora-modules"),
    ],
)
def test_a_server_that_cannot_load_its_adapters_says_so_and_ends(
    folder: Path, flags: tuple[str, ...], said: str
) -> None:
    command = [*CLI, "serve", str(folder / "model"), "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr

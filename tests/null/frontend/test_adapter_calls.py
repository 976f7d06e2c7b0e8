"""The adapters of --lora-modules, and those that a new engine gets."""

from __future__ import annotations

import asyncio

import pytest

from pegainfer.contract import codec
from pegainfer.contract.errors import ConfigError
from pegainfer.frontend.adapter_calls import AdapterModule, load_modules, parse_module
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.supervised import SupervisedEngine
from tests.null.frontend.test_engine_client import Peer, run
from tests.null.frontend.test_supervised import gone
from tests.support.fake_engine import FakeEngine


def test_modules_are_pairs_or_json() -> None:
    assert parse_module("a=/b=c") == AdapterModule("a", "/b=c")
    given = '{"name": "a", "path": "b", "base_model_name": "x"}'
    assert parse_module(given) == AdapterModule("a", "b")


@pytest.mark.parametrize("text", ["", "a", "=b", "a=", '{"name": "a"}', '{"name": 1, "path": "b"}', "{",
                                  '{"name": "a", "path": "b", "rank": 4}'])  # fmt: skip
def test_others_are_refused_before_anything_starts(text: str) -> None:
    with pytest.raises(ConfigError, match="--lora-modules"):
        HttpConfig(lora_modules=(text,))


def test_they_are_loaded_in_order_and_never_under_the_models_name() -> None:
    async def main() -> None:
        engine = FakeEngine()
        await load_modules(engine, ["a=/x", "b=/y"], ("fake",))
        assert [(a.name, a.path) for a in engine.adapters()] == [("a", "/x"), ("b", "/y")]
        with pytest.raises(ConfigError, match="the model's name"):
            await load_modules(engine, ["fake=/x"], ("fake",))

    run(main)


def test_a_new_engine_loads_what_the_one_before_had() -> None:
    async def main() -> None:
        first, second = Peer(), Peer()
        engine = SupervisedEngine(await first.connect(explain=gone))
        ends: list[object] = []
        for name in ("kept", "dropped", "failed"):
            engine.load_adapter(name, f"/{name}", ends.append)
        engine.unload_adapter("dropped", ends.append)
        for refused in (None, None, "ModelFileError", None):
            sent = await first.receive()
            assert isinstance(sent, codec.LoadAdapter | codec.UnloadAdapter)
            await first.send(codec.Done(sent.call, refused, "no such file" if refused else ""))
        while len(ends) < 4:
            await asyncio.sleep(0)
        first.close()
        await engine.wait_closed()
        engine.replace(await second.connect())
        sent = await second.receive()
        assert isinstance(sent, codec.LoadAdapter) and (sent.name, sent.path) == ("kept", "/kept")
        engine.reset_prefix_cache(ends.append)
        assert isinstance(await second.receive(), codec.ResetPrefixCache), "nothing else was loaded"

    run(main)

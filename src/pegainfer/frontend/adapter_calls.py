"""Adapters that the server loads: at its start, by its routes, and again in an engine that takes over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pegainfer.contract.errors import ConfigError, PegaError
from pegainfer.contract.handle import DoneSink, EngineHandle

EXPECTED = 'name=path, or {"name": …, "path": …}'


class AdapterModule(NamedTuple):
    """An adapter by the name that requests use, and its folder."""

    name: str
    path: str


def parse_module(text: str) -> AdapterModule:
    """One value of --lora-modules. Raises ConfigError."""
    where = "--lora-modules"
    if not text.lstrip().startswith("{"):
        name, found, path = text.partition("=")
        if not (found and name and path):
            raise ConfigError("no adapter", expected=EXPECTED, got=f"{text!r:.80}", where=where)
        return AdapterModule(name, path)
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError("no adapter", expected=EXPECTED, got=f"{error!s:.80}", where=where) from None
    # The base is whatever this server serves: its name in other servers' syntax says nothing more.
    unknown = sorted(set(given) - {"name", "path", "base_model_name"})
    texts = [given.get(key) for key in ("name", "path")]
    if unknown or not all(isinstance(t, str) and t for t in texts):
        raise ConfigError("no adapter", expected=EXPECTED, got=f"{text!r:.80}", where=where)
    return AdapterModule(given["name"], given["path"])


async def load_adapter(engine: EngineHandle, name: str, path: str, *, inplace: bool = False) -> None:
    """Returns once requests may name it. Raises PegaError.

    Args:
        inplace: it may replace an adapter of its name.
    """
    await _call(lambda done: engine.load_adapter(name, path, done, inplace))


async def unload_adapter(engine: EngineHandle, name: str) -> None:
    """Returns once no request may name it any more. Raises PegaError."""
    await _call(lambda done: engine.unload_adapter(name, done))


async def load_modules(engine: EngineHandle, modules: Sequence[str], names: Sequence[str]) -> None:
    """Loads the adapters of --lora-modules. Raises ConfigError, and PegaError of the first that fails.

    Args:
        names: of the model, which no adapter may have.
    """
    parsed = [parse_module(text) for text in modules]
    for module in parsed:
        if module.name in names:
            raise ConfigError("an adapter has the model's name", got=module.name, where="--lora-modules")
        await load_adapter(engine, *module)


async def _call(start: Callable[[DoneSink], None]) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def settle(error: PegaError | None) -> None:
        if ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    def done(error: PegaError | None) -> None:
        loop.call_soon_threadsafe(settle, error)  # an engine in this process calls from its own thread

    start(done)
    await ended

"""When the engine's process is started before its order is known, for which device, and how it ends then."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from pegainfer.cli import engine_child
from pegainfer.cli.engine_child import early_child, take_child


class Stand:
    """In place of a process."""

    made: list[Stand]

    def __init__(self, device: str = "") -> None:
        self.device = device
        self.ended: list[str] = []
        self.process = self
        Stand.made.append(self)

    def kill(self) -> None:
        self.ended.append("killed")

    def wait(self) -> None:
        self.ended.append("gone")


@pytest.fixture(autouse=True)
def stand(monkeypatch: pytest.MonkeyPatch) -> None:
    Stand.made = []
    monkeypatch.setattr(engine_child, "EngineChild", Stand)


@pytest.mark.parametrize(
    ("argv", "device"),
    [
        ("serve", "cpu"),
        ("serve m.gguf --device cuda", "cuda"),
        ("serve --device=cuda m.gguf", "cuda"),
        ("serve --device null --device cuda", "cuda"),  # the last one holds
        ("serve --device cuda --device-ordinal 1", "cpu"),
        ("serve --device null", ""),
        ("serve --device auto", ""),
        ("serve --device", "cpu"),
    ],
)
def test_a_process_loads_what_its_device_needs(argv: str, device: str) -> None:
    with early_child(argv.split()):
        (child,) = Stand.made
        assert child.device == device


@pytest.mark.parametrize("argv", ["", "generate serve", "serve --help", "serve m.gguf -h", "bench serve"])
def test_no_process_is_started_for_other_commands(argv: str) -> None:
    with early_child(argv.split()):
        assert Stand.made == []
        own: list[Any] = [take_child()]
        assert own == Stand.made


def test_a_server_loads_without_the_collector() -> None:
    with early_child(["serve"]):
        assert not gc.isenabled()
    assert gc.isenabled()
    with early_child(["generate"]):
        assert gc.isenabled()


def test_a_process_that_nobody_took_is_ended() -> None:
    with pytest.raises(ValueError, match="a flag"), early_child(["serve"]):
        raise ValueError("a flag that is not there")
    assert Stand.made[0].ended == ["killed", "gone"]
    with early_child(["serve"]):
        children: list[Any] = [take_child(), take_child()]
    taken, other = children
    assert children == Stand.made[1:] and taken.device == "cpu" and other.device == ""
    assert taken.ended == other.ended == []

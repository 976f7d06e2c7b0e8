"""Adapters: their indices, what requests with them compute, and how handles load and unload them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import (
    EngineDeadError,
    InvariantError,
    ModelFileError,
    PegaError,
    RequestError,
    UnsupportedError,
)
from pegainfer.contract.event import FinishReason, TokenEvent
from pegainfer.contract.request import GenerateRequest, hash_blocks, root_hash, unpack_tokens
from pegainfer.engine.adapters import AdapterTable
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.null.runner import NullRunner
from tests.null.engine.harness import BLOCK, MODEL, null_config, request
from tests.null.engine.test_inprocess import INFO, Inbox, Make, make  # noqa: F401

PATIENCE = 30.0


def info(name: str, digest: bytes = b"d") -> AdapterInfo:
    return AdapterInfo(name=name, path=f"/{name}", digest=digest)


# Slots


def started(table: AdapterTable[str], retired: int = 0) -> list[tuple[int, str]]:
    """Slots and names of the loads that start now."""
    return [(load.index, load.info.name) for load in table.take_loads(retired)]


def request_of(table: AdapterTable[str], name: str, seq: str) -> bool:
    """A request of one sequence, which the planner looks at; whether it may go on."""
    adapter = table.find(name)
    adapter.live += 1
    return table.claim(adapter, seq)


def leave(table: AdapterTable[str], name: str, seq: str, last_step: int, *, holds: bool = True) -> None:
    table.leave(table.find(name), seq, last_step, holds=holds)


def with_slots(size: int, names: str) -> AdapterTable[str]:
    """The first adapters are in slots."""
    table: AdapterTable[str] = AdapterTable(size)
    for name in names:
        table.add(info(name))
    for index, _ in started(table):
        table.loaded(index)
    return table


def test_adapters_are_loaded_ahead_as_long_as_slots_are_free() -> None:
    table: AdapterTable[str] = AdapterTable(2)
    for name in "abc":
        table.add(info(name))
    assert started(table) == [(0, "a"), (1, "b")]
    assert started(table) == []
    assert not request_of(table, "a", "s")  # its load has not ended
    assert (table.loaded(0), table.loaded(1)) == (["s"], [])
    assert request_of(table, "a", "t") and request_of(table, "b", "u")
    table.check_integrity()


def test_the_idle_slot_that_was_used_last_is_kept() -> None:
    table = with_slots(2, "abc")
    for name, step in (("b", 3), ("a", 4)):
        assert request_of(table, name, name)
        leave(table, name, name, step)
    assert not request_of(table, "c", "s")
    assert table.assign() == []
    assert started(table, retired=2) == [], "a plan in flight uses the slot"
    assert started(table, retired=3) == [(1, "c")]
    assert table.loaded(1) == ["s"]
    assert request_of(table, "a", "t") and not request_of(table, "b", "u")
    table.check_integrity()


def test_a_slot_is_closed_for_the_adapter_that_waits_and_comes_back_to_those_it_kept_out() -> None:
    table = with_slots(2, "abc")
    assert request_of(table, "a", "a1") and request_of(table, "a", "a2") and request_of(table, "b", "b1")
    assert not request_of(table, "c", "c1")
    assert table.assign() == []  # b is closed: fewer sequences hold it
    assert request_of(table, "a", "a3") and not request_of(table, "b", "b2")
    assert table.assign() == [] and started(table) == []
    leave(table, "b", "b1", 5)
    assert table.assign() == [] and started(table, retired=5) == [(1, "c")]
    assert table.loaded(1) == ["c1"]
    leave(table, "c", "c1", 6)
    assert table.assign() == [] and started(table, retired=6) == [(1, "b")]
    assert table.loaded(1) == ["b2"]
    table.check_integrity()


def test_a_closed_slot_is_open_again_when_nobody_waits_for_it() -> None:
    table = with_slots(1, "ab")
    assert request_of(table, "a", "a1") and not request_of(table, "b", "b1")
    assert table.assign() == [] and not request_of(table, "a", "a2")
    leave(table, "b", "b1", 0, holds=False)
    assert table.assign() == ["a2"]
    assert request_of(table, "a", "a3") and not table.is_loading
    table.check_integrity()


def test_a_failed_load_frees_the_slot_and_names_who_waited() -> None:
    table = with_slots(1, "ab")
    assert not request_of(table, "b", "b1")
    table.assign()
    assert started(table) == [(0, "b")]
    assert table.failed(0) == ["b1"]
    leave(table, "b", "b1", 0, holds=False)
    assert not request_of(table, "a", "a1")
    table.assign()
    assert started(table) == [(0, "a")]
    table.check_integrity()


def test_an_unloaded_adapter_is_gone_once_its_last_row_is_retired() -> None:
    table = with_slots(1, "a")
    assert request_of(table, "a", "s")
    adapter = table.find("a")
    assert table.drop("a") is False
    table.add(info("a", b"2"))  # the name is free at once, the slot is not
    assert table.take_unloaded(retired=9) == []
    table.leave(adapter, "s", 7, holds=True)
    assert table.take_unloaded(retired=6) == []
    assert table.take_unloaded(retired=7) == [info("a")]
    assert table.take_unloaded(retired=8) == []
    assert not request_of(table, "a", "t")
    table.assign()
    assert started(table, retired=7) == [(0, "a")]
    table.check_integrity()


def test_an_unload_says_whether_requests_still_wait_for_the_files() -> None:
    table = with_slots(1, "ab")
    assert not request_of(table, "b", "s")
    assert table.drop("b") is True
    table.assign()
    assert started(table) == [(0, "b")]
    assert table.loaded(0) == ["s"]
    table.check_integrity()


def test_names_must_be_new_to_load_and_known_to_use() -> None:
    table = with_slots(2, "a")
    with pytest.raises(RequestError, match="of this name is loaded"):
        table.add(info("a"))
    with pytest.raises(RequestError, match="no such adapter is loaded; got b"):
        table.find("b")
    with pytest.raises(RequestError, match="no such adapter is loaded; got b"):
        table.drop("b")


def test_an_unbalanced_leave_is_noticed() -> None:
    table = with_slots(1, "a")
    leave(table, "a", "s", 0)
    with pytest.raises(InvariantError, match="-1 live"):
        table.check_integrity()


def test_an_end_of_a_load_that_was_not_started_is_noticed() -> None:
    table = with_slots(1, "a")
    with pytest.raises(InvariantError, match="no load of it was started"):
        table.loaded(0)


# The handle


class Done:
    """The end of one call."""

    def __init__(self) -> None:
        self.error: PegaError | None = None
        self._ended = threading.Event()

    def __call__(self, error: PegaError | None) -> None:
        assert not self._ended.is_set(), "a call has ended twice"
        self.error = error
        self._ended.set()

    def wait(self) -> None:
        """Raises what the call raised."""
        assert self._ended.wait(PATIENCE)
        if self.error is not None:
            raise self.error


def load(engine: InProcessEngine, name: str, path: Path, *, inplace: bool = False) -> None:
    done = Done()
    engine.load_adapter(name, str(path), done, inplace)
    done.wait()


def unload(engine: InProcessEngine, name: str) -> None:
    done = Done()
    engine.unload_adapter(name, done)
    done.wait()


def answer(engine: InProcessEngine, req: GenerateRequest) -> list[int]:
    box = Inbox()
    engine.submit(req, box)
    return [token for event in box.wait() for token in event.tokens]


def expected(req: GenerateRequest, digest: bytes = b"") -> list[int]:
    return MODEL.continuation(
        unpack_tokens(req.prompt),
        req.sampling,
        7,
        eos_token_ids=req.eos_token_ids,
        max_model_len=64,
        adapter_digest=digest,
    )


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_text(f"content of {path.name}")
    return paths


def test_requests_compute_with_the_adapter_that_they_name(make: Make, files: list[Path]) -> None:  # noqa: F811
    engine = make(max_adapters=2)
    load(engine, "first", files[0])
    load(engine, "second", files[1])
    digests = [adapter.digest for adapter in engine.adapters()]
    assert [adapter.name for adapter in engine.adapters()] == ["first", "second"]
    assert digests[0] != digests[1]
    prompt = list(range(13))
    for name, digest in ((None, b""), ("first", digests[0]), ("second", digests[1])):
        req = request("r", prompt, adapter=name, max_tokens=20)
        assert answer(engine, req) == expected(req, digest)
    assert expected(req, digests[0]) != expected(req, digests[1]) != expected(req)


def test_equal_content_shares_prefixes_and_other_content_of_the_same_name_does_not(
    make: Make,  # noqa: F811
    files: list[Path],
) -> None:
    engine = make(max_adapters=2)
    prompt = list(range(13))

    def cached(name: str, **changes: object) -> int:
        box = Inbox()
        engine.submit(request("r", prompt, adapter=name, max_tokens=1, **changes), box)
        return box.wait()[-1].num_cached_tokens

    load(engine, "first", files[0])
    load(engine, "twin", files[0])
    assert (cached("first"), cached("twin")) == (0, 12)
    unload(engine, "first")
    load(engine, "first", files[1])
    assert cached("first") == 0
    assert cached("first") == 12


def test_hashes_that_were_made_for_other_content_are_made_anew(make: Make, files: list[Path]) -> None:  # noqa: F811
    engine = make(max_adapters=1)
    load(engine, "a", files[0])
    stale = engine.adapters()[0].digest
    prompt = list(range(13))
    req = request("r", prompt, adapter="a", max_tokens=1)
    assert answer(engine, req) == expected(req, stale)
    unload(engine, "a")
    load(engine, "a", files[1])
    hashes = b"".join(hash_blocks(req.prompt, BLOCK, parent=root_hash(stale, "")))
    late = request(
        "r",
        prompt,
        adapter="a",
        adapter_digest=stale,
        block_hashes=hashes,
        block_size=BLOCK,
        max_tokens=20,
    )
    assert answer(engine, late) == expected(late, engine.adapters()[0].digest)


def test_an_unloaded_adapter_serves_the_requests_that_it_has(make: Make, files: list[Path]) -> None:  # noqa: F811
    engine = make(max_adapters=1, step_seconds=0.002)
    load(engine, "a", files[0])
    digest = engine.adapters()[0].digest
    box = Inbox()
    req = request("r", [1, 2, 3], adapter="a", max_tokens=50, ignore_eos=True)
    engine.submit(req, box)
    unload(engine, "a")
    assert engine.adapters() == ()
    late = Inbox()
    engine.submit(request("late", [1, 2, 3], adapter="a"), late)
    (refused,) = late.wait()
    assert (refused.finish, refused.error_kind) == (FinishReason.ERROR, "RequestError")
    assert [token for event in box.wait() for token in event.tokens] == expected(req, digest)
    load(engine, "b", files[1])  # its index is free again
    assert answer(engine, request("b", [1, 2], adapter="b", max_tokens=3))


def test_an_adapter_whose_last_request_never_ran_leaves_its_slot(files: list[Path]) -> None:
    engine = InProcessEngine(NullRunner(null_config(max_adapters=1)), INFO)
    load(engine, "a", files[0])
    unloaded, last = Done(), Inbox()

    def sink(event: TokenEvent) -> None:
        """On the engine's thread, so that it finds both messages at once, and then has no step to make."""
        engine.submit(request("last", [1, 2], adapter="a", max_tokens=0), last)
        engine.unload_adapter("a", unloaded)

    engine.submit(request("first", [1, 2], max_tokens=1), sink)
    unloaded.wait()
    assert last.wait()[-1].finish is FinishReason.LENGTH
    load(engine, "b", files[1])
    req = request("b", [1, 2], adapter="b", max_tokens=3)
    assert answer(engine, req) == expected(req, engine.adapters()[0].digest)
    engine.close()


class Watched(NullRunner):
    """Notes what is read and installed, and holds installs back while `gate` is not set."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(null_config(**changes))
        self.reads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def read_adapter(self, name: str, path: str) -> tuple[AdapterInfo, bytes]:
        self.reads.append(name)
        return super().read_adapter(name, path)

    def install_adapter(self, index: int, adapter: bytes) -> None:
        assert self.gate.wait(PATIENCE)
        super().install_adapter(index, adapter)


def watched(tmp_path: Path, names: str, **changes: Any) -> tuple[Watched, InProcessEngine]:
    runner = Watched(**changes)
    engine = InProcessEngine(runner, INFO)
    for name in names:
        (tmp_path / name).write_text(f"content of {name}")
        load(engine, name, tmp_path / name)
    return runner, engine


def test_the_host_keeps_the_last_used_and_others_are_read_again(tmp_path: Path) -> None:
    runner, engine = watched(tmp_path, "abcd", max_adapters=1, max_host_adapters=2)
    runner.reads.clear()
    for name in "cdcdab":
        req = request(name, [1, 2, 3], adapter=name, max_tokens=4)
        digest = next(a.digest for a in engine.adapters() if a.name == name)
        assert answer(engine, req) == expected(req, digest)
    assert runner.reads == ["a", "b"]
    assert engine.stats().adapter_loads == 7  # with that of a, ahead of its first request
    engine.close()


def test_a_load_holds_up_no_other_request(tmp_path: Path) -> None:
    """One adapter's install does not end; the base model and the adapter in the other slot go on."""
    runner, engine = watched(tmp_path, "abc", max_adapters=2)
    for name in "ab":
        answer(engine, request(name, [1, 2], adapter=name, max_tokens=1))
    runner.gate.clear()
    slow = Inbox()
    late = request("late", [1, 2, 3], adapter="c", max_tokens=5)
    engine.submit(late, slow)
    for name in ("b", None):
        other = request(f"{name}", [4, 5], adapter=name, max_tokens=9, ignore_eos=True)
        assert len(answer(engine, other)) == 9
    assert not slow.events
    runner.gate.set()
    tokens = [token for event in slow.wait() for token in event.tokens]
    assert tokens == expected(late, engine.adapters()[2].digest)
    engine.close()


def test_an_adapter_replaced_in_place_keeps_its_requests_apart(tmp_path: Path) -> None:
    _, engine = watched(tmp_path, "a", max_adapters=2, step_seconds=0.002)
    old = engine.adapters()[0].digest
    box = Inbox()
    req = request("r", [1, 2, 3], adapter="a", max_tokens=50, ignore_eos=True)
    engine.submit(req, box)
    assert box.begun.wait(PATIENCE)
    with pytest.raises(RequestError, match="unload it first, or load with load_inplace"):
        load(engine, "a", tmp_path / "a")
    (tmp_path / "a").write_text("other content")
    load(engine, "a", tmp_path / "a", inplace=True)
    (new,) = engine.adapters()
    assert new.digest != old
    late = request("late", [1, 2, 3], adapter="a", max_tokens=50, ignore_eos=True)
    assert answer(engine, late) == expected(late, new.digest)
    assert [token for event in box.wait() for token in event.tokens] == expected(req, old)
    engine.close()


def test_requests_that_wait_are_served_after_an_unload_whose_files_are_deleted(tmp_path: Path) -> None:
    """The only slot is taken and the host keeps one adapter, which is not the one that is unloaded."""
    _, engine = watched(tmp_path, "ab", max_adapters=1, step_seconds=0.002)
    answer(engine, request("warm", [1, 2], adapter="b", max_tokens=1))
    answer(engine, request("warm", [1, 2], adapter="a", max_tokens=1))
    digest = engine.adapters()[1].digest
    running, waiting = Inbox(), Inbox()
    engine.submit(request("first", [1, 2, 3], adapter="a", max_tokens=50, ignore_eos=True), running)
    assert running.begun.wait(PATIENCE)
    req = request("second", [1, 2, 3], adapter="b", max_tokens=5)
    engine.submit(req, waiting)
    unload(engine, "b")
    (tmp_path / "b").unlink()
    assert [token for event in waiting.wait() for token in event.tokens] == expected(req, digest)
    running.wait()
    engine.close()


def test_files_that_changed_end_the_requests_that_need_them_and_no_others(tmp_path: Path) -> None:
    _, engine = watched(tmp_path, "ab", max_adapters=1)
    answer(engine, request("warm", [1, 2], adapter="b", max_tokens=1))  # the host has no room for a
    (tmp_path / "a").write_text("other content")
    lost = Inbox()
    engine.submit(request("lost", [1, 2], adapter="a", max_tokens=5), lost)
    end = lost.wait()[-1]
    assert (end.finish, end.error_kind) == (FinishReason.ERROR, "ModelFileError")
    assert end.error is not None and "changed after it was loaded" in end.error
    for name in ("b", None):
        assert len(answer(engine, request("r", [1, 2], adapter=name, max_tokens=5, ignore_eos=True))) == 5
    load(engine, "a", tmp_path / "a", inplace=True)
    assert len(answer(engine, request("r", [1, 2], adapter="a", max_tokens=5, ignore_eos=True))) == 5
    engine.close()


def test_requests_that_wait_for_an_adapter_count_in_the_queue(tmp_path: Path) -> None:
    runner = Watched(max_adapters=1)
    engine = InProcessEngine(runner, INFO, SchedulerConfig(max_waiting_requests=2))
    (tmp_path / "a").write_text("content")
    runner.gate.clear()
    load(engine, "a", tmp_path / "a")
    boxes = [Inbox() for _ in range(3)]
    for i, box in enumerate(boxes):
        engine.submit(request(f"r{i}", [1, 2], adapter="a", max_tokens=2), box)
    assert boxes[2].wait()[-1].error_kind == "QueueFullError"
    runner.gate.set()
    assert all(box.wait()[-1].finish is FinishReason.LENGTH for box in boxes[:2])
    engine.close()


def test_calls_that_cannot_be_obeyed_say_why(make: Make, files: list[Path], tmp_path: Path) -> None:  # noqa: F811
    engine = make(max_adapters=1)
    with pytest.raises(ModelFileError, match="cannot read the adapter"):
        load(engine, "a", tmp_path / "none")
    with pytest.raises(RequestError, match="no such adapter"):
        unload(engine, "a")
    load(engine, "a", files[0])
    with pytest.raises(UnsupportedError, match="serves no adapters"):
        load(make(), "a", files[0])
    engine.close()
    with pytest.raises(EngineDeadError):
        unload(engine, "a")


def test_a_reset_forgets_what_was_cached_and_what_runs_caches_nothing_more(make: Make) -> None:  # noqa: F811
    engine = make(step_seconds=0.002)
    prompt = list(range(13))
    answer(engine, request("r", prompt, max_tokens=1))
    running = Inbox()
    engine.submit(request("running", prompt, max_tokens=40, ignore_eos=True), running)
    assert running.begun.wait(PATIENCE)
    done = Done()
    engine.reset_prefix_cache(done)
    done.wait()
    tokens = [token for event in running.wait() for token in event.tokens]
    assert running.events[0].num_cached_tokens == 12
    box = Inbox()
    engine.submit(request("r", [*prompt, *tokens[:10]], max_tokens=1), box)
    assert box.wait()[-1].num_cached_tokens == 0
    again = Inbox()
    engine.submit(request("again", [*prompt, *tokens[:10]], max_tokens=1), again)
    assert again.wait()[-1].num_cached_tokens == 20

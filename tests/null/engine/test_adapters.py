"""Adapters: their indices, what requests with them compute, and how handles load and unload them."""

from __future__ import annotations

import threading
from pathlib import Path

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
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.null.runner import NullRunner
from tests.null.engine.harness import BLOCK, MODEL, null_config, request
from tests.null.engine.test_inprocess import INFO, Inbox, Make, make  # noqa: F401

PATIENCE = 30.0


def info(name: str, digest: bytes = b"d") -> AdapterInfo:
    return AdapterInfo(name=name, path=f"/{name}", digest=digest)


# Indices


def test_an_index_is_free_again_once_the_last_row_is_retired() -> None:
    table = AdapterTable(2)
    first = table.add(info("a"))
    table.enter(first)
    table.enter(first)
    table.drop("a")
    table.leave(first, last_step=3)
    assert table.take_free(retired=9) == []
    table.leave(first, last_step=7)
    assert table.take_free(retired=6) == []
    table.check_integrity()
    assert table.take_free(retired=7) == [first]
    assert table.take_free(retired=8) == []
    table.check_integrity()


def test_a_name_can_be_loaded_again_while_the_old_one_is_in_use() -> None:
    table = AdapterTable(2)
    old = table.add(info("a", b"1"))
    table.enter(old)
    table.drop("a")
    new = table.add(info("a", b"2"))
    assert new != old
    assert table.find("a") == (new, info("a", b"2"))
    with pytest.raises(RequestError, match="at most 2 adapters; got 1 loaded, 1 in use"):
        table.add(info("b"))


def test_names_must_be_new_to_load_and_known_to_use() -> None:
    table = AdapterTable(2)
    table.add(info("a"))
    with pytest.raises(RequestError, match="of this name is loaded"):
        table.add(info("a"))
    with pytest.raises(RequestError, match="no such adapter is loaded; got b"):
        table.find("b")
    with pytest.raises(RequestError, match="no such adapter is loaded; got b"):
        table.drop("b")


def test_an_unbalanced_leave_is_noticed() -> None:
    table = AdapterTable(1)
    table.leave(table.add(info("a")), last_step=0)
    with pytest.raises(InvariantError):
        table.check_integrity()


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


def load(engine: InProcessEngine, name: str, path: Path) -> None:
    done = Done()
    engine.load_adapter(name, str(path), done)
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


def test_an_adapter_whose_last_request_never_ran_is_removed(files: list[Path]) -> None:
    runner = NullRunner(null_config(max_adapters=1))
    engine = InProcessEngine(runner, INFO)
    load(engine, "a", files[0])
    unloaded, last = Done(), Inbox()

    def sink(event: TokenEvent) -> None:
        """On the engine's thread, so that it finds both messages at once, and then has no step to make."""
        engine.submit(request("last", [1, 2], adapter="a", max_tokens=0), last)
        engine.unload_adapter("a", unloaded)

    engine.submit(request("first", [1, 2], max_tokens=1), sink)
    unloaded.wait()
    assert last.wait()[-1].finish is FinishReason.LENGTH
    engine.close()
    assert runner.adapters.indices == []


def test_calls_that_cannot_be_obeyed_say_why(make: Make, files: list[Path], tmp_path: Path) -> None:  # noqa: F811
    engine = make(max_adapters=1)
    with pytest.raises(ModelFileError, match="cannot read the adapter"):
        load(engine, "a", tmp_path / "none")
    with pytest.raises(RequestError, match="no such adapter"):
        unload(engine, "a")
    load(engine, "a", files[0])
    with pytest.raises(RequestError, match="at most 1 adapters"):
        load(engine, "b", files[1])
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

"""Prefill and decode engines on the CPU: the tokens of one engine, whatever dies or differs."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.errors import ConfigError
from pegainfer.contract.peers import PeerStats
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.peers.peer import Peer
from pegainfer.peers.prefill import PrefillSide
from tests.support.answers import Answer, answer
from tests.support.nixl import needs_nixl
from tests.support.tinymodel import Tiny, write_checkpoint

LENGTH = 240
SCHEDULER = SchedulerConfig(max_slots=4, max_prefill_tokens=48, target_itl_ms=0.0, peer_min_tokens=16)
CONFIG = EngineConfig(
    max_model_len=LENGTH + 40, kv_cache_memory=8 << 20, backend="cpu", activation="f32", kv_dtype="f32",
    threads=1, peer_timeout=10.0,
)  # fmt: skip
Make = Callable[..., InProcessEngine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Tiny("m", seed=5, config={"intermediate_size": 128, "max_position_embeddings": 512})
    return write_checkpoint(tiny, tmp_path_factory.mktemp("model"))


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes engines; the test's end closes them, the last one first."""
    engines: list[InProcessEngine] = []

    def build(model: Path, **changes: Any) -> InProcessEngine:
        config = dataclasses.replace(CONFIG, **changes)
        built = build_engine(model, "m", config, SCHEDULER)
        engines.append(InProcessEngine(built.runner, built.info, SCHEDULER, peers=built.peers))
        return engines[-1]

    yield build
    for engine in reversed(engines):
        engine.close()


def side_of(engine: InProcessEngine) -> Any:
    loop: Any = engine._loop
    return loop._peers._side


def policy_of(engine: InProcessEngine) -> Any:
    return engine._loop._policy


def port_of(engine: InProcessEngine) -> int:
    side = side_of(engine)
    assert isinstance(side, PrefillSide)
    return side.port


def prefill_engine(
    make: Make, model: Path, listen: str = "127.0.0.1:0", **more: Any
) -> tuple[InProcessEngine, str]:
    """A prefill engine, and the address at which it listens."""
    engine = make(model, role="prefill", peer_listen=listen, **{"kv_offload": 8 << 20, **more})
    scheme = "nixl:" if listen.startswith("nixl:") else ""
    return engine, listen if listen.startswith("unix:") else f"{scheme}127.0.0.1:{port_of(engine)}"


def decode_engine(make: Make, model: Path, *addresses: str, **more: Any) -> InProcessEngine:
    """A decode engine that is connected to all its peers."""
    engine = make(model, role="decode", prefill_peers=",".join(addresses), **more)
    wait_until(lambda: all(peer.connected for peer in peer_stats(engine)))
    return engine


def read_tokens(engine: InProcessEngine) -> int:
    """Prompt tokens that a decode engine has taken from peers."""
    return sum(tier.hit_tokens for tier in engine.stats().tiers if tier.kind == "peer")


def peer_stats(engine: InProcessEngine) -> tuple[PeerStats, ...]:
    stats: tuple[PeerStats, ...] = side_of(engine).stats()
    return stats


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def requests(count: int, seed: int = 1, *, new: int = 6, salt: str = "") -> list[GenerateRequest]:
    """Prompts of many lengths, some with a common beginning."""
    r = random.Random(seed)
    common = [r.randrange(160) for _ in range(LENGTH)]
    found = []
    for i in range(count):
        length = r.randrange(1, LENGTH)
        tokens = [r.randrange(160) for _ in range(length)]
        if r.random() < 0.4:
            shared = r.randrange(length)
            tokens[:shared] = common[:shared]
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        found.append(
            GenerateRequest(
                id=f"{seed}-{i}", prompt=pack_tokens(tokens), sampling=sampling, n=r.choice([1, 1, 2]),
                cache_salt=salt,
            )
        )  # fmt: skip
    return found


def tokens_of(answers: dict[str, Answer]) -> dict[str, dict[int, list[int]]]:
    assert all(a.error is None for a in answers.values()), [a.error for a in answers.values()]
    return {name: a.tokens for name, a in answers.items()}


def wait_released(prefill: InProcessEngine) -> None:
    """Until a prefill engine holds nothing for anybody; its books then agree."""
    policy = policy_of(prefill)
    wait_until(lambda: not policy.peering._served and not policy._live and not policy.has_work())
    policy.check_integrity()


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL's connections stay on this machine."""
    monkeypatch.setenv("UCX_TLS", "tcp,self,sysv,posix,cma")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


@pytest.mark.parametrize("kind", ["tcp", "unix", "nixl"])
def test_the_tokens_of_one_engine_come_from_two(
    kind: str, make: Make, model: Path, tmp_path: Path, loopback: None
) -> None:
    if kind == "nixl":
        needs_nixl()
    batch = requests(8)
    want = tokens_of(answer(make(model), batch, {}))
    listens = {"tcp": "127.0.0.1:0", "unix": f"unix:{tmp_path / 'peer.sock'}", "nixl": "nixl:127.0.0.1:0"}
    prefill, address = prefill_engine(make, model, listens[kind])
    decode = decode_engine(make, model, address)
    assert tokens_of(answer(decode, batch, {})) == want
    (stats,) = peer_stats(decode)
    assert stats.requests > 4 and stats.failures == 0 and stats.outstanding == 0
    prompts = sum(len(request.prompt) // 4 for request in batch)
    assert read_tokens(decode) > prompts // 2
    assert stats.blocks * 16 >= read_tokens(decode) and stats.nbytes > 0
    assert next(tier for tier in decode.stats().tiers if tier.kind == "peer").failures == 0
    wait_released(prefill)


def test_a_block_is_found_under_its_own_salt_alone(make: Make, model: Path) -> None:
    """The same prompts under another salt are computed anew by the prefill engine, and read anew."""
    prefill, address = prefill_engine(make, model)
    decode = decode_engine(make, model, address)
    answers = tokens_of(answer(decode, requests(3, salt="a"), {}))
    taken, hits = read_tokens(decode), prefill.stats().prefix_hits
    other = requests(3, salt="b")
    assert tokens_of(answer(decode, other, {})) == answers  # the same tokens, from other blocks
    assert read_tokens(decode) - taken == taken
    assert prefill.stats().prefix_hits - hits == hits


def test_a_short_prompt_and_a_cached_one_are_not_asked_for(make: Make, model: Path) -> None:
    _, address = prefill_engine(make, model)
    decode = decode_engine(make, model, address)
    (request,) = requests(1, seed=4)
    answer(decode, [request], {})
    (before,) = peer_stats(decode)
    short = GenerateRequest(id="short", prompt=pack_tokens([1] * 16), sampling=request.sampling)
    again = GenerateRequest(id="again", prompt=request.prompt, sampling=request.sampling)
    answer(decode, [short, again], {})
    assert before.requests == 1 and peer_stats(decode)[0].requests == 1


@pytest.mark.parametrize("difference", ["digest", "secret"])
def test_a_foreign_engine_is_refused(
    difference: str, make: Make, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its requests are answered all the same, from its own computation."""
    more: dict[str, Any] = {}
    if difference == "secret":
        (tmp_path / "secret").write_text("0123456789abcdef")
        more["peer_secret_file"] = str(tmp_path / "secret")
    else:
        more["activation"] = "auto"  # int8 products
    prefill, address = prefill_engine(make, model, **more)
    decode = make(model, role="decode", prefill_peers=address)
    reason = {"digest": "its formats", "secret": "secret"}[difference]
    wait_until(lambda: reason in caplog.text)
    batch = requests(3)
    assert tokens_of(answer(decode, batch, {})) == tokens_of(answer(make(model), batch, {}))
    (stats,) = peer_stats(decode)
    assert not stats.connected and stats.requests == stats.failures > 0 and not stats.blocks
    assert prefill.stats().steps == 0


def test_other_machines_need_a_secret(make: Make, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="need a shared secret"):
        make(model, role="prefill", peer_listen="0.0.0.0:0", kv_offload=8 << 20)
    with pytest.raises(ConfigError, match="need a shared secret"):
        make(model, role="decode", prefill_peers="192.0.2.1:7600")
    (tmp_path / "secret").write_text("short")
    with pytest.raises(ConfigError, match="too short"):
        make(model, role="decode", prefill_peers="192.0.2.1:7600", peer_secret_file=str(tmp_path / "secret"))
    with pytest.raises(ConfigError, match="host memory"):
        make(model, role="prefill")
    with pytest.raises(ConfigError, match="addresses of prefill engines"):
        make(model, role="decode")
    for role in ("both", "prefill"):
        with pytest.raises(ConfigError, match="only a decode engine"):
            make(model, role=role, prefill_peers="127.0.0.1:7600", kv_offload=8 << 20)


def test_a_reset_uses_nothing_that_was_offered_before(make: Make, model: Path) -> None:
    prefill, address = prefill_engine(make, model)
    decode = decode_engine(make, model, address)
    batch = requests(3)
    want = tokens_of(answer(decode, batch, {}))
    taken = read_tokens(decode)
    done = threading.Event()
    decode.reset_prefix_cache(lambda error: done.set())
    assert done.wait(60)
    assert tokens_of(answer(decode, requests(3), {})) == want
    assert read_tokens(decode) == 2 * taken
    wait_released(prefill)


# Deaths: the engine that dies is a process of its own. It is no fork, which NIXL's threads here would not
# survive.

SPAWN: Any = multiprocessing.get_context("spawn")


def prefill_child(model: Path, pipe: Connection, scheme: str = "") -> None:
    """A prefill engine, until it is killed."""
    listen = f"{scheme}127.0.0.1:0"
    config = dataclasses.replace(CONFIG, role="prefill", peer_listen=listen, kv_offload=8 << 20)
    built = build_engine(model, "m", config, SCHEDULER)
    engine = InProcessEngine(built.runner, built.info, SCHEDULER, peers=built.peers)
    pipe.send(f"{scheme}127.0.0.1:{port_of(engine)}")
    while True:
        time.sleep(60)


def decode_child(model: Path, pipe: Connection) -> None:
    """A decode engine that answers requests of the peer at the address that it gets, until it is killed."""
    config = dataclasses.replace(CONFIG, role="decode", prefill_peers=pipe.recv())
    built = build_engine(model, "m", config, SCHEDULER)
    engine = InProcessEngine(built.runner, built.info, SCHEDULER, peers=built.peers)
    wait_until(lambda: peer_stats(engine)[0].connected)
    for seed in range(10**6):
        answer(engine, requests(4, seed=100 + seed), {})
        pipe.send(read_tokens(engine))


@contextlib.contextmanager
def child(work: Callable[..., None], model: Path, *args: str) -> Iterator[tuple[Any, Connection]]:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=work, args=(model, there, *args), daemon=True)
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        process.kill()
        process.join()
        here.close()


@pytest.mark.parametrize("scheme", ["", "nixl:"], ids=["tcp", "nixl"])
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_survive_a_prefill_engine_that_dies_or_hangs(
    death: signal.Signals, scheme: str, make: Make, model: Path, loopback: None
) -> None:
    """It ends in the middle of a load; the decode server computes what it lacks, then is on its own."""
    if scheme:
        needs_nixl()
    batch = requests(6, seed=3) + requests(6, seed=9)
    with child(prefill_child, model, scheme) as (process, pipe):
        assert pipe.poll(120)
        address = pipe.recv()
        want = tokens_of(answer(make(model), batch, {}))
        decode = decode_engine(make, model, address, peer_timeout=4.0)
        answer(decode, requests(2, seed=5), {})
        before = peer_stats(decode)[0].blocks
        assert before > 0
        read = Peer.fetch

        def kill(self: Peer, *args: Any) -> None:
            stats = peer_stats(decode)[0]
            if stats.blocks > before + 2 and stats.outstanding:
                os.kill(process.pid, death)
            read(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Peer, "fetch", kill)
            assert tokens_of(answer(decode, batch, {})) == want
        (stats,) = peer_stats(decode)
        assert stats.failures > 0 and stats.outstanding == 0
        wait_until(lambda: not peer_stats(decode)[0].connected)
        late = requests(2, seed=21)
        assert tokens_of(answer(decode, late, {})) == tokens_of(answer(make(model), late, {}))
        policy_of(decode).check_integrity()


def test_a_prefill_engine_frees_what_a_dead_decode_engine_had(make: Make, model: Path) -> None:
    """It is killed under load, again and again; another one is served in between."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(child(decode_child, model)) for _ in range(2)]
        prefill, address = prefill_engine(make, model)
        for process, pipe in children:
            pipe.send(address)
            assert pipe.poll(120) and pipe.recv() > 0
            wait_until(lambda: len(policy_of(prefill).peering._served) > 1)
            os.kill(process.pid, signal.SIGKILL)
            wait_released(prefill)
        decode = decode_engine(make, model, address)
        batch = requests(3)
        assert tokens_of(answer(decode, batch, {})) == tokens_of(answer(make(model), batch, {}))
        assert read_tokens(decode) > 0
        wait_released(prefill)

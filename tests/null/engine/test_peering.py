"""A prefill and a decode scheduler on null devices, with a link that delays, breaks and loses blocks."""

from __future__ import annotations

import os
import random
from collections import deque
from typing import Any

import msgspec
import pytest

from pegainfer.contract.errors import RequestError
from pegainfer.contract.peers import Ended, PeerBlock, Prefill, Produced, Release
from pegainfer.contract.request import GenerateRequest
from pegainfer.contract.tiers import DEVICE, Tier, Transfer
from pegainfer.engine.config import SchedulerConfig
from tests.null.engine.harness import SPECS, Driver, null_config, request

RUNS = int(os.environ.get("PEER_RUNS", "6"))


class Pair:
    """Two engines; messages wait in queues until they are delivered."""

    def __init__(
        self,
        seed: int,
        spec: str = "pages",
        *,
        host: int = 64,
        blocks: int = 64,
        peer: int = 256,
        chunk: int = 16,
    ) -> None:
        """
        Args:
            host, blocks, peer: for each group, blocks of the prefill engine's host tier, of both devices, and
                of peers that the decode engine can know of.
            chunk: prompt tokens of a step.
        """
        kv = SPECS[spec]
        groups = len(kv.groups)
        common: dict[str, Any] = {"kv": kv, "num_blocks": (blocks,) * groups, "transfer_steps": 3}
        config = SchedulerConfig(peer_min_tokens=4, max_prefill_tokens=chunk)
        self.prefill = Driver(
            null_config(**common, tiers=(Tier(kind="host", num_blocks=(host,) * groups),)), config, seed=seed
        )
        self.decode = Driver(
            null_config(**common, tiers=(Tier(kind="peer", num_blocks=(peer,) * groups),)), config, seed=seed
        )
        peering: Any = self.prefill.scheduler.peering
        peering._add = self._add
        self.to_prefill: deque[Prefill | Release] = deque()
        self.to_decode: deque[Produced | Ended] = deque()
        self.held: dict[str, dict[tuple[int, bytes], PeerBlock]] = {}  # by request that is not released
        self.broken = 0
        runners: tuple[Any, Any] = self.prefill.runner, self.decode.runner
        theirs, transfers = (runner._transfers for runner in runners)
        start = transfers.start

        def read(t: Transfer, content: Any) -> None:
            """A load from the peer takes the content that the prefill engine holds, or fails."""
            found = None
            if t.source_pool != DEVICE:
                blocks = [held[t.group, t.key] for held in self.held.values() if (t.group, t.key) in held]
                found = theirs._contents[1].get((t.group, blocks[0].place)) if blocks else None
                transfers._contents[1][t.group, t.source] = found or [0]
                transfers._keys[1, t.group, t.source] = t.key
            start(t, content)
            transfers._moves[-1].fails |= t.source_pool != DEVICE and found is None

        transfers.start = read

    def _add(self, made: GenerateRequest, now: float) -> None:
        """With a seed, so that the one token can be predicted."""
        self.prefill.add(
            msgspec.structs.replace(made, sampling=msgspec.structs.replace(made.sampling, seed=7))
        )

    def exchange(self) -> None:
        """Takes what the engines have to say."""
        for message in self.decode.scheduler.peering.take_peer_messages():
            assert isinstance(message, Prefill | Release)
            self.to_prefill.append(message)
        for message in self.prefill.scheduler.peering.take_peer_messages():
            assert isinstance(message, Produced | Ended)
            if message.id in self.held:
                self.to_decode.append(message)
                if isinstance(message, Produced):
                    self.held[message.id].update({(b.group, b.key): b for b in message.blocks})

    def deliver_to_prefill(self) -> None:
        if self.to_prefill:
            message = self.to_prefill.popleft()
            if isinstance(message, Prefill):
                self.held[message.id] = {}
                self.prefill.scheduler.peering.prefill_for_peer(message, self.prefill.now)
            elif self.held.pop(message.id, None) is not None:
                self.prefill.scheduler.peering.from_peer(message)

    def deliver_to_decode(self) -> None:
        if self.to_decode:
            self.decode.scheduler.peering.from_peer(self.to_decode.popleft())

    def break_link(self) -> None:
        """Each engine learns that the other one is gone; nothing on its way arrives."""
        self.exchange()
        self.broken += 1
        asked = [m.id for m in self.to_prefill if isinstance(m, Prefill)] + list(self.held)
        self.to_prefill.clear()
        self.to_decode.clear()
        for request_id in asked:
            self.decode.scheduler.peering.from_peer(Ended(request_id, "lost"))
            self.prefill.scheduler.peering.from_peer(Release(request_id))
        self.held.clear()

    def run(self) -> None:
        """Until both have nothing to do and nothing to say."""
        for _ in range(20_000):
            self.exchange()
            self.deliver_to_prefill()
            self.deliver_to_decode()
            for driver in (self.prefill, self.decode):
                if driver.scheduler.has_work():
                    driver.step()
            self.exchange()
            idle = not (self.prefill.scheduler.has_work() or self.decode.scheduler.has_work())
            if idle and not (self.to_prefill or self.to_decode):
                return
        raise AssertionError("still at work")

    def judge(self) -> None:
        """The predicted tokens; nothing is held for anybody."""
        self.decode.judge()
        self.prefill.judge()
        assert not self.held and not self.prefill.scheduler.peering._served
        assert not self.decode.scheduler.peering._waits and not self.decode.scheduler.peering._offered


def prompt(first: int, length: int) -> list[int]:
    return [(first + i) % 20 for i in range(length)]


@pytest.mark.parametrize("spec", list(SPECS))
def test_the_decode_engine_computes_only_the_end_of_a_prompt(spec: str) -> None:
    pair = Pair(1, spec)
    pair.decode.add(request("a", prompt(0, 44), max_tokens=5))
    pair.run()
    pair.judge()
    start = next(row.start for plan in pair.decode.plans for row in plan.rows)
    assert start == 40  # of every layout the longest prefix that can be reused
    assert pair.decode.answers["a", 0].events[0].num_cached_tokens == 40


def test_blocks_are_loaded_while_others_are_computed() -> None:
    pair = Pair(1, chunk=4)
    pair.decode.add(request("a", prompt(0, 60), max_tokens=2))
    early = 0
    for _ in range(500):
        pair.exchange()
        pair.deliver_to_prefill()
        pair.deliver_to_decode()
        computing = bool(pair.prefill.running)
        loads = pair.decode.counts["loads"]
        for driver in (pair.prefill, pair.decode):
            if driver.scheduler.has_work():
                driver.step()
        early += (pair.decode.counts["loads"] - loads) * computing
    pair.run()
    pair.judge()
    assert early > 0


def test_a_lost_peer_leaves_what_was_read_and_the_rest_is_computed() -> None:
    pair = Pair(1)
    pair.decode.add(request("a", prompt(0, 60), max_tokens=3))
    while pair.decode.counts["loads"] < 4:
        pair.exchange()
        pair.deliver_to_prefill()
        pair.deliver_to_decode()
        for driver in (pair.prefill, pair.decode):
            if driver.scheduler.has_work():
                driver.step()
    pair.break_link()
    assert not pair.prefill.scheduler.peering._served
    pair.run()
    pair.judge()
    cached = pair.decode.answers["a", 0].events[0].num_cached_tokens
    assert 0 < cached < 56
    assert pair.prefill.counts["finish abort"] + pair.prefill.counts["finish length"] == 1


def test_short_prompts_and_cached_ones_are_computed_here() -> None:
    pair = Pair(1)
    pair.decode.add(request("short", prompt(0, 4), max_tokens=2))
    pair.run()
    assert not pair.prefill.requests
    pair.decode.add(request("long", prompt(0, 30), max_tokens=2))
    pair.run()
    pair.decode.add(request("again", prompt(0, 30), max_tokens=2))
    pair.decode.add(request("salted", prompt(0, 30), max_tokens=2, salt="x"))
    pair.run()
    assert len(pair.prefill.requests) == 2  # long and salted
    pair.judge()
    assert pair.prefill.scheduler.stats().prefix_hits == 0


def test_an_engine_without_a_host_tier_prefills_for_nobody() -> None:
    driver = Driver()
    with pytest.raises(RequestError, match="no host tier"):
        driver.scheduler.peering.prefill_for_peer(Prefill("1", b"\0\0\0\0"), 0.0)


def test_what_a_peer_says_of_unknown_requests_and_groups_changes_nothing() -> None:
    pair = Pair(1)
    peering = pair.decode.scheduler.peering
    peering.from_peer(Produced("7", (PeerBlock(0, bytes(32), 0),)))
    peering.from_peer(Ended("7"))
    pair.decode.add(request("a", prompt(0, 20), max_tokens=2))
    (asked,) = peering.take_peer_messages()
    peering.from_peer(
        Produced(asked.id, (PeerBlock(5, bytes(32), 0), PeerBlock(-1, bytes(32), 0), PeerBlock(0, b"", 0)))
    )
    assert not peering._offered
    peering.from_peer(Ended(asked.id, "refused"))
    pair.decode.run()
    assert peering.take_peer_messages() == [Release(asked.id)]
    pair.decode.judge()


def test_nothing_that_comes_after_a_reset_is_offered() -> None:
    pair = Pair(1)
    scheduler = pair.decode.scheduler
    pair.decode.add(request("a", prompt(0, 20), max_tokens=2))
    (asked,) = scheduler.peering.take_peer_messages()
    scheduler.reset_prefix_cache()
    scheduler.peering.from_peer(Produced(asked.id, (PeerBlock(0, bytes(32), 0),)))
    assert not scheduler.peering._offered
    pair.decode.run()
    pair.decode.judge()


@pytest.mark.parametrize("seed", range(RUNS))
def test_random_traffic_over_a_link_that_breaks(seed: int) -> None:
    """Prompts that share beginnings, cancels, resets, small pools: no token differs and nothing leaks."""
    r = random.Random(seed)
    spec = r.choice(list(SPECS))
    pair = Pair(seed, spec, host=r.choice([8, 24, 64]), blocks=r.choice([24, 64]), peer=r.choice([6, 256]))
    ids: list[str] = []
    for _ in range(400):
        kind = r.random()
        if kind < 0.15 and len(ids) < 40:
            ids.append(f"r{len(ids)}")
            pair.decode.add(
                request(
                    ids[-1], prompt(r.randrange(3), r.randrange(1, 56)), max_tokens=r.randrange(1, 8),
                    n=r.choice([1, 1, 2]), salt=r.choice(["", "", "s"]), tenant=r.choice("ab"),
                    priority=r.randrange(2),
                )
            )  # fmt: skip
        elif kind < 0.17 and ids:
            pair.decode.cancel(r.choice(ids))
        elif kind < 0.18:
            r.choice([pair.decode, pair.prefill]).reset_prefix_cache()
        elif kind < 0.2:
            pair.break_link()
        elif kind < 0.45:
            pair.exchange()
            pair.deliver_to_prefill()
        elif kind < 0.7:
            pair.exchange()
            pair.deliver_to_decode()
        else:
            driver = r.choice([pair.decode, pair.prefill])
            if driver.scheduler.has_work():
                driver.step()
    pair.run()
    pair.judge()
    assert pair.prefill.requests

"""KV events over ZeroMQ, read as the subscribers of vLLM's servers read them."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.app.kv_events import KVEventsConfig, Publisher, publish_to, read_config
from pegainfer.contract.errors import ConfigError, UnsupportedError
from pegainfer.contract.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from pegainfer.engine.config import SchedulerConfig
from tests.support.server import serving

SECONDS = 20.0
REMOVED = BlockRemoved(block_hashes=[2**64 - 1], medium="CPU", group_idx=1)
STORED = BlockStored(
    block_hashes=[5], parent_block_hash=None, token_ids=[1, 2], block_size=2, medium="GPU", lora_name=None,
    extra_keys=[None], group_idx=0, kv_cache_spec_kind="full_attention",
)  # fmt: skip


class Subscriber:
    """The sockets of a router."""

    def __init__(self, events: str, replay: str, topic: str = "") -> None:
        self._context: Any = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._replay = self._context.socket(zmq.REQ)
        for socket, place in ((self._events, events), (self._replay, replay)):
            socket.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1e3))
            socket.connect(place)

    def next(self) -> tuple[bytes, int, list[Any]]:
        """Topic, number and batch of the next message."""
        topic, number, batch = self._events.recv_multipart()
        return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)

    def replay(self, first: int) -> tuple[int, Any]:
        """Number and batch of the first message that is sent again; a REQ socket reads one of several."""
        self._replay.send(first.to_bytes(8, "big"))
        number, batch = self._replay.recv_multipart()
        return int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    return {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}


@pytest.fixture
def opened(places: dict[str, str]) -> Iterator[tuple[Publisher, Subscriber]]:
    publisher = Publisher(KVEventsConfig(topic="kv", **places))  # type: ignore[arg-type]
    subscriber = Subscriber(places["endpoint"], places["replay_endpoint"], "kv")
    # A subscription takes a moment to arrive: what is sent before is lost.
    arrived = threading.Event()

    def greet() -> None:
        while not arrived.wait(0.01):
            publisher.publish([], 9)

    greeting = threading.Thread(target=greet)
    greeting.start()
    subscriber.next()
    arrived.set()
    greeting.join()
    publisher.publish([AllBlocksCleared()], 9)
    while subscriber.next()[2][1] != [{"type": "AllBlocksCleared"}]:
        pass
    yield publisher, subscriber
    publisher.close()
    subscriber.close()


def test_events_have_the_form_that_routers_read(opened: tuple[Publisher, Subscriber]) -> None:
    publisher, subscriber = opened
    publisher.publish([STORED, REMOVED], 3)
    topic, number, (seconds, events, rank) = subscriber.next()
    assert (topic, rank) == (b"kv", 3)
    assert seconds > 1.7e9
    stored, removed = events
    assert stored == {
        "type": "BlockStored", "block_hashes": [5], "parent_block_hash": None, "token_ids": [1, 2],
        "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None],
        "group_idx": 0, "kv_cache_spec_kind": "full_attention",
    }  # fmt: skip
    assert removed == {
        "type": "BlockRemoved", "block_hashes": [2**64 - 1], "medium": "CPU", "group_idx": 1
    }  # fmt: skip
    publisher.publish([AllBlocksCleared()], 0)
    assert subscriber.next()[1] == number + 1


def test_what_was_missed_is_sent_again(opened: tuple[Publisher, Subscriber]) -> None:
    publisher, subscriber = opened
    publisher.publish([REMOVED], 0)
    _, number, batch = subscriber.next()
    assert subscriber.replay(number) == (number, batch)


def test_a_slow_subscriber_gets_all_that_it_asked_for(places: dict[str, str]) -> None:
    batches = 5000  # more than sockets keep by default
    publisher = Publisher(KVEventsConfig(buffer_steps=batches, **places))  # type: ignore[arg-type]
    for _ in range(batches):
        publisher.publish([STORED], 0)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1e3))
        socket.connect(places["replay_endpoint"])
        while len(publisher._sent) < batches:
            time.sleep(0.01)
        socket.send_multipart([b"", bytes(8)])
        time.sleep(0.5)  # until the answer is sent, as far as anything takes it
        numbers = []
        while (answer := socket.recv_multipart())[2]:
            numbers.append(int.from_bytes(answer[1], "big"))
    publisher.close()
    assert numbers == list(range(batches))


def test_a_subscriber_that_asks_for_nonsense_disturbs_nobody(
    opened: tuple[Publisher, Subscriber], places: dict[str, str]
) -> None:
    publisher, subscriber = opened
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(places["replay_endpoint"])
        for request in ([b"x"], [b"", b"1234567"], [b""] * 5):
            socket.send_multipart(request)
    publisher.publish([REMOVED], 0)
    assert subscriber.next()[2][1][0]["type"] == "BlockRemoved"


def test_dropped_batches_leave_a_gap_in_the_numbers(
    opened: tuple[Publisher, Subscriber], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, subscriber = opened
    publisher.publish([REMOVED], 0)
    before = subscriber.next()[1]
    waiting = publisher._waiting

    def full(numbered: tuple[int, bytes] | None) -> None:
        raise queue.Full

    with monkeypatch.context() as patch:
        patch.setattr(waiting, "put_nowait", full)
        publisher.publish([REMOVED], 0)
        publisher.publish([REMOVED], 0)
    assert caplog.text.count("dropped") == 1
    publisher.publish([REMOVED], 0)
    assert subscriber.next()[1] == before + 3


def test_the_gap_is_where_batches_were_dropped(
    places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: None)
        publisher = Publisher(KVEventsConfig(max_queue_size=2, **places))  # type: ignore[arg-type]
    for _ in range(4):  # two are kept
        publisher.publish([REMOVED], 0)
    publisher._send(publisher._waiting.get())
    publisher.publish([REMOVED], 0)
    while not publisher._waiting.empty():
        publisher._send(publisher._waiting.get())
    publisher._context.destroy()
    assert [number for number, _ in publisher._sent] == [0, 1, 4]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "bad kv_events_config"),
        ('["zmq"]', "Expected `object`"),
        ('{"enable": true}', "unknown field `enable`"),
        ('{"enable_kv_cache_events": 1}', "Expected `bool`"),
        ('{"publisher": "kafka"}', "kafka"),
        ('{"buffer_steps": 0}', "sizes from 1 to"),
        ('{"hwm": 3000000000}', "sizes from 1 to"),
        ('{"max_queue_size": 1' + "0" * 30 + "}", "sizes from 1 to"),
        (
            '{"endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:1"}',
            "a replay_endpoint that is not the end",
        ),
        ('{"topic": "\udcff"}', "surrogates"),
        ("[" * 100_000, "bad kv_events_config"),
    ],
)
def test_a_bad_option_is_refused(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_config(text)


def test_events_without_a_prefix_cache_are_refused() -> None:
    on = '{"enable_kv_cache_events": true}'
    with pytest.raises(ConfigError, match="the prefix cache, which is off"):
        read_config(on, prefix_cache=False)
    assert read_config("{}", prefix_cache=False) is None


def test_a_bad_option_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    config = EngineConfig(kv_events_config="{")
    with pytest.raises(ConfigError, match="bad kv_events_config"):
        build_engine(tmp_path / "no model", "m", config, SchedulerConfig())


def test_python_gives_a_mapping() -> None:
    config = read_config({"enable_kv_cache_events": True, "topic": "kv"})
    assert config == KVEventsConfig(enable_kv_cache_events=True, topic="kv")
    with pytest.raises(ConfigError, match="unknown field `enable`"):
        read_config({"enable": True})
    with pytest.raises(ConfigError, match="surrogates"):
        read_config({"endpoint": "ipc:///\udcff"})


@pytest.mark.parametrize("text", ["", "{}", '{"enable_kv_cache_events": true, "publisher": "null"}'])
def test_nothing_is_published_unasked(text: str) -> None:
    assert read_config(text) is None


@pytest.mark.parametrize("place", ["tcp://*:port", "nonsense", "ipc:///nowhere/at/all"])
def test_an_endpoint_that_cannot_be_used_is_named(place: str) -> None:
    with pytest.raises(ConfigError, match="KV events cannot be published; got " + place.replace("*", r"\*")):
        Publisher(KVEventsConfig(endpoint=place))


def test_a_policy_without_events_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no KV events; got object"):
        publish_to(object(), '{"enable_kv_cache_events": true}')  # type: ignore[arg-type]


def test_a_server_tells_of_prompts_and_resets(places: dict[str, str]) -> None:
    config = json.dumps({"enable_kv_cache_events": True, **places})
    with serving("--device", "null", "--max-model-len", "512", "--kv-events-config", config) as server:
        subscriber = Subscriber(places["endpoint"], places["replay_endpoint"])

        def ask(prompt: str) -> None:
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
            httpx.post(f"{server.url}/v1/completions", json=body).raise_for_status()

        ask("a" * 100)
        number, batch = subscriber.replay(0)
        assert number == 0
        (event,) = batch[1]
        assert (event["type"], event["parent_block_hash"]) == ("BlockStored", None)
        assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"] > 0
        # The null device's tokens are bytes.
        assert set(event["token_ids"]) <= {ord("a"), *range(256, 300)}
        subscriber.close()

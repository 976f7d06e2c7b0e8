"""Publishes KV events over ZeroMQ, as vLLM does: `--kv-events-config`.

A message has three parts: the topic, a sequence number (8 bytes, big-endian), and a msgpack array of the time
(seconds since 1970), the events of one step, and the data-parallel rank. A subscriber that has missed
messages sends the number of the first one to the replay endpoint. It is answered with pairs of number and
batch, then with the number -1 and an empty batch.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pegainfer.contract.errors import ConfigError, UnsupportedError
from pegainfer.contract.kv_events import KVEvent, KVEventPolicy
from pegainfer.contract.step import StepPolicy

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

WHERE = "kv_events_config"
CLOSE_SECONDS = 1.0
POLL_MILLISECONDS = 100
MOST = 1_000_000_000  # of each size; ZeroMQ counts in 31 bits
END = (-1).to_bytes(8, "big", signed=True)


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields and defaults of vLLM's option of the same name."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None  # None: zmq where events are on
    endpoint: str = "tcp://*:5557"  # bound where it has a *, or is no TCP address; else connected to
    replay_endpoint: str | None = None  # bound; None: nothing can be asked for again
    buffer_steps: int = 10_000  # batches that can be asked for again
    hwm: int = 100_000  # messages that wait for a slow subscriber; more are dropped
    max_queue_size: int = 100_000  # batches that wait for the publisher's thread; more are dropped
    topic: str = ""


def read_config(given: str | Mapping[str, Any], *, prefix_cache: bool = True) -> KVEventsConfig | None:
    """The option's value, None where nothing shall be published.

    Raises ConfigError, also where events are asked for without a prefix cache.
    """
    if not given:
        return None
    try:
        if isinstance(given, str):
            config = msgspec.json.decode(given, type=KVEventsConfig)
        else:
            config = msgspec.convert(given, KVEventsConfig)
        for text in (config.topic, config.endpoint, config.replay_endpoint or ""):
            text.encode()  # bytes of the command line that are no UTF-8 cannot be sent
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(
            "bad kv_events_config", expected='a JSON object, as {"enable_kv_cache_events": true}',
            got=f"{error!s:.200}", where=WHERE,
        ) from None  # fmt: skip
    if not all(1 <= n <= MOST for n in (config.buffer_steps, config.hwm, config.max_queue_size)):
        raise ConfigError(
            "bad kv_events_config", expected=f"sizes from 1 to {MOST}", got=f"{given!s:.200}", where=WHERE
        )
    if config.endpoint == config.replay_endpoint:
        raise ConfigError(
            "bad kv_events_config", expected="a replay_endpoint that is not the endpoint",
            got=config.endpoint, where=WHERE,
        )  # fmt: skip
    if not config.enable_kv_cache_events or config.publisher == "null":
        return None
    if not prefix_cache:
        raise ConfigError(
            "KV events describe the prefix cache, which is off", where=WHERE,
            remedy="leave out the option, or switch the prefix cache on",
        )  # fmt: skip
    return config


class Publisher:
    """Implements contract.kv_events.KVEventSink with a thread that owns the sockets."""

    def __init__(self, config: KVEventsConfig) -> None:
        """Raises ConfigError where ZeroMQ is not installed, or an endpoint cannot be used."""
        try:
            import zmq
        except ImportError:
            raise ConfigError(
                "KV events need pyzmq", got="it is not installed", where=WHERE,
                remedy="pip install 'pegainfer[kv-events]'",
            ) from None  # fmt: skip
        self._topic = config.topic.encode()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._number = 0  # of the next batch
        self._waiting: queue.Queue[tuple[int, bytes] | None] = queue.Queue(config.max_queue_size)
        self._drops = False  # whether the last batch was dropped
        self._encoder = msgspec.msgpack.Encoder()
        self._ended = threading.Event()
        self._replay: zmq.Socket[bytes] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.linger = int(CLOSE_SECONDS * 1e3)
        endpoint = config.endpoint
        try:
            self._events = self._context.socket(zmq.PUB)
            self._events.set_hwm(config.hwm)
            remote = endpoint.startswith("tcp://") and "*" not in endpoint and "::" not in endpoint
            (self._events.connect if remote else self._events.bind)(endpoint)
            if config.replay_endpoint is not None:
                endpoint = config.replay_endpoint
                self._replay = self._context.socket(zmq.ROUTER)
                # A socket drops messages beyond this number: a whole answer fits, with its end.
                self._replay.sndhwm = config.buffer_steps + 1
                self._replay.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                "KV events cannot be published", got=f"{endpoint}: {error}", where=WHERE,
                remedy="name another endpoint, as tcp://*:5558",
            ) from None  # fmt: skip
        log.info("KV events, which hold the token ids of prompts, go to %s", config.endpoint)
        self._thread = threading.Thread(target=self._work, name="kv events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KVEvent], data_rank: int) -> None:
        # Encoded at once: the caller goes on to change its lists.
        batch = self._encoder.encode((time.time(), events, data_rank))
        # A dropped batch has a number, too, so that subscribers notice where one is missing.
        number, self._number = self._number, self._number + 1
        try:
            self._waiting.put_nowait((number, batch))
            self._drops = False
        except queue.Full:
            if not self._drops:
                log.warning("KV events are dropped: %d batches wait to be sent", self._waiting.maxsize)
            self._drops = True

    def close(self) -> None:
        self._ended.set()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(2 * CLOSE_SECONDS)

    # On the thread

    def _work(self) -> None:
        try:
            while not self._ended.is_set():
                if self._replay is not None and self._replay.poll(0):
                    self._answer(self._replay)
                with contextlib.suppress(queue.Empty):
                    self._send(self._waiting.get(timeout=POLL_MILLISECONDS / 1e3))
            deadline = time.monotonic() + CLOSE_SECONDS
            while not self._waiting.empty() and time.monotonic() < deadline:
                self._send(self._waiting.get())
        except Exception:
            log.exception("KV events are not published any more")
        finally:
            self._context.destroy()

    def _send(self, numbered: tuple[int, bytes] | None) -> None:
        if numbered is None:
            return
        number, batch = numbered
        self._events.send_multipart((self._topic, number.to_bytes(8, "big"), batch))
        self._sent.append(numbered)

    def _answer(self, replay: Any) -> None:
        """Sends the batches that a subscriber asks for; a request that is not a number is ignored."""
        client, *rest = replay.recv_multipart()
        if len(rest) != 2 or len(rest[1]) != 8:
            got = b"".join(rest)[:16]
            log.warning("a request for KV events is ignored; expected an empty part and 8 bytes, got %r", got)
            return
        first = int.from_bytes(rest[1], "big")
        for number, batch in list(self._sent):
            if number >= first:
                replay.send_multipart((client, b"", number.to_bytes(8, "big"), batch))
        replay.send_multipart((client, b"", END, b""))


def publish_to(policy: StepPolicy, given: str | Mapping[str, Any], *, prefix_cache: bool = True) -> None:
    """Publishes the prefix cache of a policy as the option says.

    Raises as `read_config`, and UnsupportedError where the policy has no events.
    """
    config = read_config(given, prefix_cache=prefix_cache)
    if config is None:
        return
    if not isinstance(policy, KVEventPolicy):
        raise UnsupportedError("this model's step policy has no KV events", got=type(policy).__name__)
    policy.publish_kv_events(Publisher(config))

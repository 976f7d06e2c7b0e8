"""The prefill engine's side: listens for decode engines, takes their prompts, and serves the blocks.

    a thread accepts; each connection has a thread that reads it
    control connection: Prefill, Release ─► the engine;  Produced, Ended ◄─ the engine, by a writer thread
    other connections of the same client: Fetch ─► a block of the host tier

What was produced for a request is held until it is released, and no read of it is in progress. A client that
is lost releases all that it had.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from pegainfer.contract.errors import EngineDeadError, PegaError
from pegainfer.contract.peers import Ended, PeerStats, Prefill, Produced, Release, ToDecode, ToPrefill
from pegainfer.kv.device.store import BlockStore, StoreError
from pegainfer.peers.channel import Channel, Fetch, PeerError, Ping, Refused, admit
from pegainfer.peers.config import Address, PeerOptions
from pegainfer.peers.transport import SharedMemory
from pegainfer.peers.transports import transport_of

log = logging.getLogger(__name__)

ACCEPT_RETRY = 0.5  # seconds, after a lack of descriptors, say
Deliver = Callable[[ToPrefill | ToDecode], None]
ACCEPT_RETRY = 1.0  # seconds after a connection that could not be taken


@dataclass
class _Request:
    """What a client may read of one of its requests."""

    places: dict[tuple[int, bytes], int] = field(default_factory=dict)  # (group, key) -> block of the store
    reads: int = 0  # in progress
    released: bool = False


class PrefillSide:
    """Implements PeerSide for a prefill engine."""

    is_prefill = True

    def __init__(
        self,
        address: Address,
        options: PeerOptions,
        store: BlockStore,
        memory: SharedMemory | None = None,
    ) -> None:
        """Listens at once, so that clients may connect; they are answered from `start` on.

        Args:
            store: of the host tier.
            memory: in which the store keeps its blocks, where it can be shared.

        Raises ConfigError where the address cannot be listened at.
        """
        self._transport = transport_of(address, memory)
        self._options = options.at(address)
        self._store = store
        self._listener = self._transport.listen()
        self.port = 0 if address.path else int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._requests: dict[str, _Request] = {}  # by the engine's id of a request
        self._outboxes: dict[str, queue.SimpleQueue[ToDecode | Ping | None]] = {}  # by session
        self._channels: set[Channel] = set()
        self._spawning = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self._deliver: Deliver = lambda message: None

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._spawn(self._accept)

    def send(self, message: ToPrefill | ToDecode) -> None:
        if not isinstance(message, Produced | Ended):
            return
        session, _, name = message.id.partition("/")
        with self._lock:
            request = self._requests.get(message.id)
            if request is None or request.released:
                return
            if isinstance(message, Produced):
                request.places.update(((b.group, b.key), b.place) for b in message.blocks)
            outbox = self._outboxes.get(session)
        if outbox is not None:
            outbox.put(msgspec.structs.replace(message, id=name))

    def stats(self) -> tuple[PeerStats, ...]:
        return ()

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            channels = list(self._channels)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for channel in channels:
            channel.close()
        while self._threads:
            self._threads.pop().join()

    # On the threads

    def _spawn(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="kv peers", daemon=True)
        with self._spawning:
            self._threads = [t for t in self._threads if t.is_alive()]
            thread.start()
            self._threads.append(thread)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                # For example, the process has no descriptors left for the moment.
                log.warning("a connection of a decode engine could not be taken: %s", error)
                self._closed.wait(ACCEPT_RETRY)
                continue
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        """One connection from its handshake to its end."""
        channel = Channel(connection, self._options.seconds)
        with self._lock:
            self._channels.add(channel)
            closed = self._closed.is_set()
        try:
            if not closed:
                admit(channel, self._options)
                self._read(channel)
        except (PegaError, TimeoutError) as error:
            log.info("a connection to a decode engine has ended: %s", error or "it was silent")
        finally:
            with self._lock:
                self._channels.discard(channel)
            self._lose(channel.session)
            channel.close()
            self._transport.forget(channel.session)

    def _read(self, channel: Channel) -> None:
        reads_for = ""  # the session whose blocks it reads
        while True:
            try:
                message = channel.receive()
            except TimeoutError:
                if reads_for in self._outboxes:
                    continue  # a connection for blocks has nothing to say, while the other one lives
                raise
            match message:
                case Fetch():
                    reads_for = message.session
                    self._send_block(channel, message)
                case Prefill():
                    self._open_outbox(channel)
                    named = msgspec.structs.replace(message, id=f"{channel.session}/{message.id}")
                    with self._lock:
                        self._requests[named.id] = _Request()
                    self._tell(named)
                case Release():
                    self._release(f"{channel.session}/{message.id}")
                case Ping():
                    self._open_outbox(channel).put(Ping())
                case _:
                    raise PeerError("unexpected message of a peer", got=type(message).__name__)

    def _open_outbox(self, channel: Channel) -> queue.SimpleQueue[ToDecode | Ping | None]:
        with self._lock:
            outbox = self._outboxes.get(channel.session)
            if outbox is None:
                outbox = self._outboxes[channel.session] = queue.SimpleQueue()
                self._spawn(self._write, channel, outbox)
        return outbox

    def _write(self, channel: Channel, outbox: queue.SimpleQueue[ToDecode | Ping | None]) -> None:
        while (message := outbox.get()) is not None:
            try:
                channel.send(message)
            except PeerError:
                channel.close()  # which ends the reader, too
                return

    def _send_block(self, channel: Channel, fetch: Fetch) -> None:
        """Answers a Fetch. The block is held until it is sent: a release waits for the read."""
        request_id = f"{fetch.session}/{fetch.id}"
        with self._lock:
            request = self._requests.get(request_id)
            place = None if request is None else request.places.get((fetch.group, fetch.key))
            if request is None or request.released or place is None:
                request = None
            else:
                request.reads += 1
        if request is None or place is None:
            channel.send(Refused("the block is not held any more"))
            return
        try:
            self._store.read(
                fetch.group, place, fetch.key, lambda content: self._transport.send(channel, content)
            )
        except StoreError as error:
            channel.send(Refused(str(error)))
        finally:
            with self._lock:
                request.reads -= 1
                done = request.released and not request.reads
            if done:
                self._forget(request_id)

    def _release(self, request_id: str) -> None:
        with self._lock:
            request = self._requests.get(request_id)
            if request is None or request.released:
                return
            request.released = True
            done = not request.reads
        if done:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        """Nothing reads the request's blocks any more: the engine may use them again."""
        with self._lock:
            self._requests.pop(request_id, None)
        self._tell(Release(request_id))

    def _lose(self, session: str) -> None:
        """A client has gone: what it had is released."""
        with self._lock:
            outbox = self._outboxes.pop(session, None)
            lost = [request_id for request_id in self._requests if request_id.startswith(f"{session}/")]
        if outbox is not None:
            outbox.put(None)
            for request_id in lost:
                self._release(request_id)

    def _tell(self, message: ToPrefill | ToDecode) -> None:
        with contextlib.suppress(EngineDeadError):
            self._deliver(message)

"""One prefill peer of a decode engine: a control connection that comes back, and connections for blocks."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

from pegainfer.contract.peers import Ended, PeerStats, Prefill, Produced, Release, ToDecode
from pegainfer.kv.device.store import Bytes, StoreError
from pegainfer.peers.channel import Channel, Fetch, PeerError, Ping, greet
from pegainfer.peers.config import Address, PeerOptions
from pegainfer.peers.transports import transport_of

log = logging.getLogger(__name__)

FIRST_RETRY, LAST_RETRY = 0.1, 5.0  # seconds between attempts to connect
BEATS = 4  # the control connection is checked so many times before either side gives the other one up


class Peer:
    """Threads: one connects and reads, one writes. Requests are ended when the connection is lost."""

    def __init__(
        self, address: Address, options: PeerOptions, heard: Callable[[Peer, ToDecode], None]
    ) -> None:
        """`heard` takes the peer's messages, on this peer's thread or the caller's of `ask`."""
        self._address = address
        self._options = options.at(address)
        self._heard = heard
        self._transport = transport_of(address)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._channel: Channel | None = None  # None while it is not connected
        self._outbox: queue.SimpleQueue[Prefill | Release | Ping | None] = queue.SimpleQueue()
        self._due: dict[str, float] = {}  # requests that it computes -> CLOCK_MONOTONIC when they are slow
        self._spare: list[Channel] = []  # connections for blocks
        self._busy: set[Channel] = set()
        self._requests = self._failures = self._blocks = self._nbytes = 0
        self._seconds = 0.0
        self._refusal = ""  # the last reason that was logged
        self._threads = [
            threading.Thread(target=work, name="kv peer", daemon=True) for work in (self._run, self._write)
        ]

    def start(self) -> None:
        """Connects; `ask` may come before that, and then ends at once."""
        for thread in self._threads:
            thread.start()

    @property
    def load(self) -> tuple[bool, int]:
        """The lower, the better for the next request."""
        return self._channel is None, len(self._due)

    def ask(self, message: Prefill) -> None:
        """Sends a prompt; its end is heard in any case."""
        with self._lock:
            self._requests += 1
            connected = self._channel is not None
            if connected:
                self._due[message.id] = time.monotonic() + self._options.seconds
                self._outbox.put(message)
            else:
                self._failures += 1
        if not connected:
            self._heard(self, Ended(message.id, "no prefill peer is connected"))

    def release(self, message: Release) -> None:
        """A request's blocks are not needed any more."""
        with self._lock:
            self._due.pop(message.id, None)
        self._outbox.put(message)

    def fetch(self, request_id: str, group: int, key: bytes, out: Bytes) -> None:
        """Reads a block into `out`, on the caller's thread. Raises StoreError."""
        begin = time.monotonic()
        channel = None
        try:
            control = self._channel
            if control is None:
                raise PeerError("the prefill peer is lost", where=self._address.text)
            channel = self._take()
            channel.send(Fetch(control.session, request_id, group, key))
            self._transport.receive(channel, out)
        except (PeerError, OSError) as error:
            if channel is not None:
                self._drop(channel)
            raise StoreError("a block could not be read from a peer", got=str(error)) from None
        with self._lock:
            self._busy.discard(channel)
            self._spare.append(channel)
            self._blocks += 1
            self._nbytes += out.nbytes
            self._seconds += time.monotonic() - begin

    def _take(self) -> Channel:
        """A connection for blocks. Raises PeerError, OSError."""
        with self._lock:
            if self._spare:
                channel = self._spare.pop()
                self._busy.add(channel)
                return channel
        channel = self._connect()
        with self._lock:
            self._busy.add(channel)
            ends = self._stop.is_set()
        if ends:  # `close` may have been too early to see this connection
            self._drop(channel)
            raise PeerError("the engine ends")
        return channel

    def _drop(self, channel: Channel) -> None:
        with self._lock:
            self._busy.discard(channel)
        channel.close()
        self._transport.forget(channel.session)

    def _connect(self) -> Channel:
        """Raises PeerError, OSError."""
        seconds = self._options.seconds
        channel = Channel(self._transport.connect(seconds), seconds)
        try:
            greet(channel, self._options)
        except BaseException:
            channel.close()
            raise
        return channel

    def stats(self) -> PeerStats:
        """What happened so far."""
        with self._lock:
            return PeerStats(
                address=self._address.text,
                connected=self._channel is not None,
                requests=self._requests,
                failures=self._failures,
                outstanding=len(self._due),
                blocks=self._blocks,
                nbytes=self._nbytes,
                seconds=self._seconds,
            )

    def close(self) -> None:
        """Ends connections and threads; harmless when repeated."""
        with self._lock:
            self._stop.set()
            channels = [*self._spare, *self._busy, *([self._channel] if self._channel else [])]
        for channel in channels:
            channel.close()
        self._outbox.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    # On the threads

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            channel = self._channel
            if channel is not None:
                try:
                    channel.send(message)
                except PeerError:
                    channel.close()  # the reader sees that

    def _run(self) -> None:
        """Connects again and again until `close`."""
        retry = FIRST_RETRY
        while not self._stop.is_set():
            try:
                channel = self._connect()
            except (PeerError, OSError) as error:
                self._log_refusal(str(error))
                self._stop.wait(retry)
                retry = min(LAST_RETRY, 2 * retry)
                continue
            retry = FIRST_RETRY
            log.info("prefill peer %s is connected", self._address.text)
            self._refusal = ""
            with self._lock:
                self._channel = channel
            try:
                if not self._stop.is_set():
                    self._read(channel)
            except PeerError as error:
                self._log_refusal(str(error))
            finally:
                with self._lock:
                    self._channel = None
                    lost = list(self._due)
                    spare, self._spare = self._spare, []
                channel.close()
                for one in spare:
                    self._drop(one)
                for request_id in lost:
                    self._fail(request_id, "the prefill peer was lost")

    def _read(self, channel: Channel) -> None:
        """Until the connection ends. Raises PeerError."""
        beat = channel.patience / BEATS
        channel.socket.settimeout(beat)
        heard = pinged = time.monotonic()
        while not self._stop.is_set():
            message = None
            with contextlib.suppress(TimeoutError):
                message = channel.receive()
            now = time.monotonic()
            if isinstance(message, Produced | Ended):
                self._note(message, now)
            if message is not None:
                heard = now
            elif now - heard > self._options.seconds:
                raise PeerError("a prefill peer is silent", where=self._address.text)
            if now - pinged > beat / 2:
                pinged = now
                self._outbox.put(Ping())
            with self._lock:
                slow = [request_id for request_id, due in self._due.items() if due < now]
            for request_id in slow:
                self._fail(request_id, "the prefill peer is too slow")

    def _note(self, message: ToDecode, now: float) -> None:
        with self._lock:
            if message.id not in self._due:
                return  # released or given up
            if isinstance(message, Ended):
                del self._due[message.id]
                self._failures += message.error is not None
            else:
                self._due[message.id] = now + self._options.seconds
        self._heard(self, message)

    def _fail(self, request_id: str, error: str) -> None:
        with self._lock:
            if self._due.pop(request_id, None) is None:
                return
            self._failures += 1
        self._heard(self, Ended(request_id, error))

    def _log_refusal(self, text: str) -> None:
        """Once for each reason, not at each attempt."""
        if text != self._refusal and not self._stop.is_set():
            self._refusal = text
            log.warning("prefill peer %s: %s", self._address.text, text)

"""What connections to peers need: addresses, the secret, the digest of both sides, time limits."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from pegainfer.contract.errors import ConfigError

LEAST_SECRET = 16  # bytes
MOST_PATH = 107  # bytes of a Unix socket's path, sockaddr_un(7)


@dataclass(frozen=True)
class Address:
    """HOST:PORT for TCP, the path of a Unix socket, over which memory is shared, or nixl:HOST:PORT."""

    text: str
    host: str = ""
    port: int = 0
    path: str = ""
    nixl: bool = False  # blocks are read through NIXL

    @property
    def is_local(self) -> bool:
        """Whether no other machine can connect."""
        if self.path:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True)
class PeerOptions:
    """
    Attributes:
        digest: of all that the bytes of a block depend on, 32 bytes; a peer with another one is refused.
        secret: known to both sides; b"" where all addresses are local.
        seconds: without a word from a peer until it counts as lost, or as too slow for a request.
    """

    digest: bytes
    secret: bytes
    seconds: float

    def at(self, address: Address) -> PeerOptions:
        """With another digest for addresses of NIXL, so that both sides use it or neither does."""
        if not address.nixl:
            return self
        return replace(self, digest=hashlib.sha256(self.digest + b"nixl").digest())


def parse_address(text: str, where: str) -> Address:
    """Raises ConfigError."""
    if text.startswith("unix:") and len(text) > 5:
        return Address(text, path=_socket_path(text, where))
    nixl = text.startswith("nixl:")
    host, _, port = text.removeprefix("nixl:").rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    # Five digits at most, because int() refuses very long numbers.
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535
    if not is_port or not _is_host(host):
        raise ConfigError(
            "bad address of a peer",
            expected="HOST:PORT, unix:PATH or nixl:HOST:PORT",
            got=repr(text),
            where=where,
        )
    return Address(text, host=host, port=int(port), nixl=nixl)


def _socket_path(text: str, where: str) -> str:
    """The absolute path of unix:PATH. Raises ConfigError."""
    try:
        path = str(Path(text[5:]).expanduser().absolute())
    except RuntimeError as error:  # no such user in ~user
        raise ConfigError("bad address of a peer", got=f"{text!r}: {error}", where=where) from None
    if "\0" in path or len(os.fsencode(path)) > MOST_PATH:
        raise ConfigError(
            "bad path of a Unix socket", expected=f"{MOST_PATH} bytes or fewer, none of them zero",
            got=repr(path), where=where, remedy="choose a shorter path, as unix:/run/pegainfer/kv.sock",
        )  # fmt: skip
    return path


def _is_host(host: str) -> bool:
    """Whether it is an IP address, or a name that the resolver takes: labels of 1 to 63 characters.

    A URL is neither: its name would be looked up in vain again and again.
    """
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return False
        return True
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return re.fullmatch(r"[\w.-]+", host) is not None


def read_secret(path: str, addresses: list[Address]) -> bytes:
    """The secret in a file; b"" without one. Raises ConfigError where an address needs a longer one."""
    if not path:
        for address in addresses:
            if not address.is_local:
                raise ConfigError(
                    "peers on other machines need a shared secret", got=address.text,
                    where="peer_secret_file",
                    remedy="write 32 random bytes, as hex, to a file that both engines can read",
                )  # fmt: skip
        return b""
    try:
        secret = Path(path).expanduser().read_bytes().strip()
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte in the path, no such user in ~user
        raise ConfigError("cannot read the peers' secret", got=str(error), where="peer_secret_file") from None
    if len(secret) < LEAST_SECRET:
        raise ConfigError(
            "the peers' secret is too short", expected=f"{LEAST_SECRET} bytes or more", got=len(secret),
            where=path,
        )  # fmt: skip
    return secret

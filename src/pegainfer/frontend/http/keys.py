"""API keys as they are configured: in plain text, or as the SHA-256 digest of one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from pegainfer.contract.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


def digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    """SHA-256 of each key. 'sha256:' and 64 hexadecimal digits stand for the key with that digest."""
    return tuple(_digest(key) for key in keys)


def read_keys(path: str) -> tuple[str, ...]:
    """The keys of a file, one a line; empty lines and those that begin with # are none.

    Raises ConfigError for a file that cannot be read or holds no key.
    """
    where = f"--api-key-file {path}"
    try:
        data = Path(path).expanduser().read_bytes()[: MAX_FILE_BYTES + 1]
        lines = [line.strip() for line in data.decode().splitlines()]
    except OSError as e:
        raise ConfigError(f"cannot read the keys: {e.strerror}", where=where) from None
    except UnicodeDecodeError:
        raise ConfigError("the keys are no UTF-8 text", where=where) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError("the file of keys is too large", expected=f"≤ {MAX_FILE_BYTES} bytes", where=where)
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        # Without a key the server would be open, which is not what a file of keys asks for.
        raise ConfigError("the file holds no key", where=where, expected="a key a line")
    return keys


def _digest(key: str) -> bytes:
    match = _DIGEST.fullmatch(key)
    return bytes.fromhex(match[1]) if match else hashlib.sha256(key.encode()).digest()

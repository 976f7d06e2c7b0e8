"""API keys as they are configured: in plain text, or as the SHA-256 digest of one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from pegainfer.contract.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
_DIGEST = re.compile(r"(?i:sha256:)([0-9a-fA-F]{64})")


def digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    """SHA-256 of each key, each once. 'sha256:' and 64 hexadecimal digits stand for the key with that digest.

    Raises ConfigError for 'sha256:' and anything else: taken for a key, it would never fit.
    """
    return tuple(dict.fromkeys(_digest(key) for key in keys))


def read_keys(path: str) -> tuple[str, ...]:
    """The keys of a file, one a line; empty lines and those that begin with # are none.

    Raises ConfigError for a file that cannot be read or holds no key.
    """
    where = f"--api-key-file {path}"
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        lines = [line.strip() for line in data.decode("utf-8-sig").splitlines()]
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
    if not key.lower().startswith("sha256:"):
        return hashlib.sha256(key.encode()).digest()
    match = _DIGEST.fullmatch(key)
    if match is None:
        # The faulty digest itself is not shown: it may be a key, after all.
        raise ConfigError("no digest of a key", expected="sha256: and 64 hexadecimal digits", where="a key")
    return bytes.fromhex(match[1])

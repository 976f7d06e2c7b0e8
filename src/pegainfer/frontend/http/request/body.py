"""From the bytes of a request body to a checked struct, or a 400 that names the field.

The standard library's JSON reader is used instead of msgspec's because it can be made to refuse what a
server must not guess about: a key given twice, NaN, Infinity and numbers that overflow to them.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import math
import re
import time
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope

from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.request.neutral import remedy, without_neutral

T = TypeVar("T", bound=msgspec.Struct)

THREAD_BYTES = 64 << 10  # a longer body is parsed off the event loop (about 1 ms a 100 KiB)
MIN_RATE = 1024  # bytes a second: a body that trickles in more slowly is given up
# What curl says of the data that it is given, where nobody tells it otherwise.
_FORM = b"application/x-www-form-urlencoded"


class ClientGoneError(Exception):
    """The client hung up; there is nobody to answer."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this lower-case name."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def from_browser(scope: Scope) -> bool:
    """Whether a browser sent it for a page: no page can leave all of these headers out."""
    return any(header(scope, name) is not None for name in (b"origin", b"sec-fetch-site", b"sec-fetch-mode"))


def _check_type(scope: Scope) -> None:
    """Raises ApiError (415) for a body that does not say that it is JSON.

    A page of another site can send text and forms unasked, and JSON only after a question that it gets no yes
    to. Other clients may leave the type out, or send what curl makes of it.
    """
    given = header(scope, b"content-type") or b""
    kind = given.split(b";")[0].strip().lower()
    if kind in (b"", b"application/json") or kind.endswith(b"+json"):
        return
    if kind != _FORM or from_browser(scope):
        got = kind.decode("latin-1")[:60]
        raise ApiError(415, f"Content-Type: expected application/json, got {got!r}", param="Content-Type")


async def read_body(scope: Scope, receive: Receive, config: HttpConfig) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 beyond `max_body_bytes`, 408 on silence and for what trickles in, 415 for what is no
            JSON, 400 for a compressed body.
        ClientGoneError: the client hung up before its end.
    """
    _check_type(scope)
    for name in (b"content-encoding", b"transfer-encoding"):
        if header(scope, name) not in (None, b"", b"identity", b"chunked"):
            raise ApiError(
                400, f"{name.decode().title()}: expected none, got a compressed body; send it as it is"
            )
    declared = header(scope, b"content-length")
    if declared is not None and int(declared) > config.max_body_bytes:
        raise _too_large(config, int(declared))
    body = bytearray()
    began = time.monotonic()
    while True:
        try:
            async with asyncio.timeout(config.body_seconds):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, f"the request body stopped for {config.body_seconds:g} s") from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > config.max_body_bytes:
            raise _too_large(config, len(body))
        if not message.get("more_body", False):
            return bytes(body)
        if time.monotonic() - began > config.body_seconds + len(body) / MIN_RATE:
            raise ApiError(408, f"the request body came too slowly; expected ≥ {MIN_RATE} bytes a second")


def _too_large(config: HttpConfig, size: int) -> ApiError:
    return ApiError(
        413, f"request body too large: expected ≤ {config.max_body_bytes} bytes, got at least {size}"
    )


async def read_request(scope: Scope, receive: Receive, kind: type[T], config: HttpConfig) -> tuple[T, int]:
    """The whole body as a struct, checked against its types, and the body's size in bytes.

    Raises what `read_body` raises, and ApiError (400) for another body than `kind` describes.
    """
    body = await read_body(scope, receive, config)
    if len(body) <= THREAD_BYTES:
        return decode(body, kind, config.max_json_depth), len(body)
    return await asyncio.to_thread(decode, body, kind, config.max_json_depth), len(body)


def decode(body: bytes, kind: type[T], max_depth: int) -> T:
    """A struct of a JSON object, on the thread that calls. Raises ApiError (400)."""
    value = load_json(body, max_depth)
    if not isinstance(value, dict):
        raise ApiError(400, f"request body: expected a JSON object, got {_json_name(value)}")
    return convert(value, kind)


def convert(value: Any, kind: type[T], where: str = "") -> T:
    """A struct of decoded JSON. Raises ApiError (400).

    Args:
        where: the field that holds the value, for the message.
    """
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError:
        pass
    try:  # again without what asks for nothing; most bodies hold nothing of the kind
        return msgspec.convert(without_neutral(value, kind), type=kind)
    except msgspec.ValidationError as e:
        raise _field_error(str(e), where) from None


def load_json(body: bytes, max_depth: int) -> Any:
    """Strict JSON: UTF-8, no duplicate keys, finite numbers, no lone surrogates, bounded depth.

    Raises ApiError (400).
    """
    try:
        text = body.removeprefix(codecs.BOM_UTF8).decode()  # some clients put a byte order mark first
    except UnicodeDecodeError as e:
        raise ApiError(
            400, f"request body: expected UTF-8, got an invalid byte at offset {e.start}"
        ) from None
    if not text.strip():
        raise ApiError(400, "request body: expected a JSON object, got nothing")
    try:
        value = _decoder.decode(text)
    except json.JSONDecodeError as e:
        where = f"line {e.lineno} column {e.colno}"
        raise ApiError(400, f"request body: expected JSON, got a syntax error at {where}: {e.msg}") from None
    except RecursionError:
        raise ApiError(400, f"request body: nested too deeply; expected ≤ {max_depth} levels") from None
    except ValueError:  # int() of thousands of digits
        raise ApiError(400, "request body: a number has too many digits") from None
    # Both scans are rarely needed: few bodies hold so many brackets, or an escaped surrogate.
    if text.count("[") + text.count("{") > max_depth and _deeper_than(value, max_depth):
        raise ApiError(400, f"request body: nested too deeply; expected ≤ {max_depth} levels")
    if _SURROGATE.search(text) and _has_surrogate(value):
        raise ApiError(400, "request body: a string holds half of a UTF-16 surrogate pair")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ApiError(400, f"{key[:100]}: given twice in one object", param=key[:100])
            seen.add(key)
    return out


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ApiError(400, f"request body: the number {text[:40]} is out of range")
    return value


def _constant(text: str) -> float:
    raise ApiError(400, f"request body: expected JSON, got {text}, which JSON does not have")


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        below: list[Any] = []
        for node in level:
            children = node.values() if isinstance(node, dict) else node
            below.extend(c for c in children if type(c) is dict or type(c) is list)
        if not below:
            return False
        level = below
    return True


def _has_surrogate(value: Any) -> bool:
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            try:
                node.encode("utf-8")
            except UnicodeEncodeError:
                return True
        elif isinstance(node, dict):
            stack.extend(node.keys())
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
    return False


def _json_name(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    return {list: "an array", str: "a string", type(None): "null"}.get(type(value), "a number")


_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(.*)`$", re.DOTALL)


def _field_error(text: str, where: str) -> ApiError:
    """Turns msgspec's sentence, e.g. 'Expected `int`, got `str` - at `$.n`', into ours."""
    match = _PATH.match(text)
    assert match is not None
    what, path = match["what"], match["path"] or ""
    for pattern, sentence in (
        (_UNKNOWN, "unknown field; this server does not accept it"),
        (_MISSING, "required"),
    ):
        if named := pattern.match(what):
            path = (f"{path}." if path else "") + named[1]
            what = sentence
            if pattern is _UNKNOWN and remedy(named[1]):
                what += "; " + remedy(named[1])
    path = (f"{where}.{path}" if path and where else where or path)[:200]
    what = what.replace("`", "").replace("Expected", "expected", 1)
    return ApiError(400, f"{path}: {what}" if path else what, param=path or None)

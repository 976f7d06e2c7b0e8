"""A request as it crosses from the text side to the engine: token ids and numbers only, no text."""

from __future__ import annotations

import array
import hashlib
import struct
import sys
from collections.abc import Sequence
from typing import Annotated, Literal, get_type_hints

import msgspec

HASH_BYTES = 32  # SHA-256
# A temperature below this means greedy, for HTTP, the offline API and every sampler. So low a temperature
# only tells apart logits that are closer than their own float32 rounding error. A power of two is the same
# number in float32 and float64.
GREEDY_BELOW = 2.0**-20
# Bounds under which logits stay finite in float32 whatever fields meet: a bias of 1e15 over a penalty of
# 1e-15 is 1e30.
LARGEST = 1e15
SMALLEST_DIVISOR = 1e-15
INT32_MAX = 2**31 - 1


class Number(msgspec.Struct, frozen=True):
    """Says of a sampling parameter that it is one number, and which values it may have.

    The HTTP server's checks and API documentation, the engine's checks and the runners' arrays of sampling
    parameters follow from it: see `NUMBERS`.
    """

    about: str  # its meaning, for readers of the API's documentation
    low: float  # of a request over HTTP, inclusive
    high: float  # of a request over HTTP, inclusive
    engine: tuple[float, float] | None = None  # the engine's own bounds, inclusive; None: low and high
    above: bool = False  # the lower bound itself is refused
    whole: bool = False  # an integer

    def in_request(self, value: float) -> bool:
        """Whether a request over HTTP may have this value. NaN is in no range."""
        return self.low <= value <= self.high and not (self.above and value == self.low)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is drawn. Defaults are OpenAI's; the HTTP room sets its own per route.

    The order of application is that of the field: logit_bias, allowed and banned tokens, min_tokens,
    penalties, temperature, top_k, top_p, min_p.
    """

    # Below GREEDY_BELOW it means greedy: the highest logit, the lowest id among equals.
    temperature: Annotated[float, Number("0 always takes the likeliest token", 0, 100, (0, LARGEST))] = 1.0
    # 0 means off; -1 too over HTTP.
    top_k: Annotated[
        int,
        Number("draw among the k likeliest; 0 and -1 are off", -1, INT32_MAX, (0, INT32_MAX), whole=True),
    ] = 0
    # 1 means off; the smallest set whose mass reaches top_p, after top_k.
    top_p: Annotated[float, Number("draw among the likeliest that reach this mass", 0, 1, above=True)] = 1.0
    # Drops tokens under min_p times the best probability.
    min_p: Annotated[float, Number("drop tokens less likely than this share of the likeliest", 0, 1)] = 0.0
    seed: int | None = None  # None: drawn by the engine at admission
    # Divides positive, multiplies negative logits of tokens seen (prompt too).
    repetition_penalty: Annotated[
        float,
        Number(
            "divides the logits of tokens that were there before; 1 is off",
            0.01,
            100,
            (SMALLEST_DIVISOR, LARGEST),
        ),
    ] = 1.0
    # Subtracted once from each token that was generated.
    presence_penalty: Annotated[
        float,
        Number("taken off the logit of a token that was generated before", -2, 2, (-LARGEST, LARGEST)),
    ] = 0.0
    # Subtracted as often as the token was generated.
    frequency_penalty: Annotated[
        float,
        Number("taken off a token's logit for each time it was generated", -2, 2, (-LARGEST, LARGEST)),
    ] = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    allowed_token_ids: tuple[int, ...] | None = None  # only these may be drawn
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    min_tokens: int = 0  # EOS and stop ids are masked until so many tokens were generated
    max_tokens: int | None = None  # None: up to the context's end
    stop_token_ids: tuple[int, ...] = ()  # end the sequence, and are reported as its stop reason
    ignore_eos: bool = False  # the model's own EOS ids no longer stop or count for min_tokens
    logprobs: int | None = None  # None: none; 0: of the drawn token only; k: and of the k best
    prompt_logprobs: int | None = None  # the same for each prompt token but the first
    # No text is wanted but one vector of the prompt: of the hidden states after the final norm their mean, or
    # the last one. It comes with the finish; max_tokens is 1, whose token is nobody's.
    pooling: Literal["mean", "last"] | None = None


# The sampling parameters that are one number, by name.
NUMBERS: dict[str, Number] = {
    name: about
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
    for about in getattr(hint, "__metadata__", ())
    if isinstance(about, Number)
}


class GrammarSpec(msgspec.Struct, frozen=True):
    """A constraint on the output, checked by the front; the engine makes matchers from it."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark", "structural_tag"]  # as asked for
    text: str  # in llguidance's own form, whatever the kind


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt to continue n times. Prefilled once, then forked."""

    id: str  # unique among live requests
    prompt: bytes  # int32 little-endian token ids, at least one
    sampling: SamplingParams = SamplingParams()
    n: int = 1  # how many continuations; TokenEvent.index tells them apart
    eos_token_ids: tuple[int, ...] = ()  # the model's; ids beyond the vocabulary end nothing
    block_hashes: bytes = b""  # HASH_BYTES for each full block of the prompt, chained; empty: engine hashes
    block_size: int = 0  # of block_hashes, in tokens; must be the engine's if hashes are given
    grammar: GrammarSpec | None = None
    adapter: str | None = None  # LoRA adapter's name
    # AdapterInfo.digest of the adapter that block_hashes were made for; where the engine has loaded other
    # content under the name since, it makes the hashes anew.
    adapter_digest: bytes = b""
    cache_salt: str = ""  # prefixes are shared only among requests with the same salt
    priority: int = 0  # lower runs first, as in vLLM
    tenant: str = ""  # whose it is: the engine shares its time fairly among tenants
    deadline: float | None = None  # CLOCK_MONOTONIC seconds; past it the request ends with an error
    arrival: float = 0.0  # CLOCK_MONOTONIC seconds when the front accepted it
    trace: str | None = None  # W3C traceparent


def pack_tokens(ids: Sequence[int]) -> bytes:
    """int32 little-endian bytes of token ids."""
    if isinstance(ids, array.array) and ids.typecode == "i" and sys.byteorder == "little":
        return ids.tobytes()
    return struct.pack(f"<{len(ids)}i", *ids)


def token_array(data: bytes) -> array.array[int]:
    """The inverse of `pack_tokens`. Raises ValueError where the length is not a multiple of four."""
    a = array.array("i")
    a.frombytes(data)
    if sys.byteorder == "big":
        a.byteswap()
    return a


def unpack_tokens(data: bytes) -> list[int]:
    """`token_array` as a list."""
    return token_array(data).tolist()


def root_hash(adapter_digest: bytes | None, cache_salt: str) -> bytes:
    """The chain's start: requests of another adapter's content or another salt never share a block."""
    h = hashlib.sha256(b"pegainfer-kv-1")
    for raw in (adapter_digest or b"", cache_salt.encode("utf-8", "surrogatepass")):
        h.update(len(raw).to_bytes(8, "little") + raw)
    return h.digest()


def hash_blocks(
    tokens: bytes, block_size: int, *, parent: bytes, start_block: int = 0, num_blocks: int | None = None
) -> list[bytes]:
    """Chained SHA-256 of the full blocks of `tokens`, from `start_block` whose parent's hash is `parent`.

    Args:
        tokens: int32 little-endian ids of the whole sequence.
        block_size: tokens a block.
        num_blocks: how many to hash; all full ones that follow if None.
    """
    stride = 4 * block_size
    full = len(tokens) // stride
    stop = full if num_blocks is None else min(full, start_block + num_blocks)
    out: list[bytes] = []
    for i in range(start_block, stop):
        parent = hashlib.sha256(parent + tokens[i * stride : (i + 1) * stride]).digest()
        out.append(parent)
    return out

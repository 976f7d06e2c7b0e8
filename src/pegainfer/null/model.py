"""The language model of the null device: the next token is a pure function of the tokens before it.

Whatever way a sequence was scheduled, chunked, preempted or shared, its tokens must come out the same, so a
test can predict them without an engine: `continuation`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pegainfer.contract.event import TokenLogprob
from pegainfer.contract.request import GREEDY_BELOW, SamplingParams

MASK64 = (1 << 64) - 1
# What a byte-level tokenizer shows as text: mostly small letters, with blanks and a line's end now and then.
LETTERS = tuple(b"etaoin shrdlu cmfwyp vbgkqjxz. etaoin shr,\n")

# (all tokens so far, how many of them are prompt, seed) -> next token
NextToken = Callable[[Sequence[int], int, int], int]


def chain_start(adapter_digest: bytes = b"") -> int:
    """The chain before any token; an adapter of other content computes other states."""
    return zlib.crc32(adapter_digest)


def chain_next(chain: int, token: int) -> int:
    """A 64-bit stand-in for what a model's state holds after `token`: it depends on all tokens so far."""
    return ((chain ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & MASK64


def scramble(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): each bit of x moves all bits of the result."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


HIDDEN_SIZE = 8


def hidden_state(chain: int) -> list[float]:
    """HIDDEN_SIZE numbers in [-1, 1) that stand for a position's hidden state."""
    return [(scramble(chain + i) % 256 - 128) / 128 for i in range(HIDDEN_SIZE)]


@dataclass(frozen=True, kw_only=True)
class NullModel:
    """Draws tokens. Of the sampling parameters it knows greedy (the seed does not matter), seed,
    allowed_token_ids, min_tokens with the masked ids, and logprobs."""

    vocab_size: int = 258
    letters: tuple[int, ...] = LETTERS
    eos_id: int | None = 257
    eos_every: int = 64  # one token in so many is EOS; 0: never
    next_token: NextToken | None = None  # in place of the hash, e.g. a scripted answer

    def draw(
        self,
        tokens: Sequence[int],
        chain: int,
        num_prompt: int,
        sampling: SamplingParams,
        seed: int,
        mask_tokens: Sequence[int] = (),
        mask: bytes | None = None,
    ) -> int:
        """The token after `tokens`, whose chain is `chain`. `mask`: bits of allowed ids, lowest first."""
        if self.next_token is not None:
            return self.next_token(tokens, num_prompt, seed)
        x = scramble(chain ^ (0 if sampling.temperature < GREEDY_BELOW else seed))
        banned: Sequence[int] = mask_tokens if len(tokens) - num_prompt < sampling.min_tokens else ()
        choices: Sequence[int] = self.letters
        if sampling.allowed_token_ids is not None:
            choices = sampling.allowed_token_ids
        elif mask is not None:
            choices = [t for t in range(self.vocab_size) if mask[t >> 3] >> (t & 7) & 1]
        elif self.eos_id is not None and self.eos_every and x % self.eos_every == 0:
            choices = (self.eos_id,) if self.eos_id not in banned else self.letters
        y = scramble(x)
        for i in range(len(choices)):
            token = choices[(y + i) % len(choices)]
            if token not in banned:
                return token
        return choices[y % len(choices)]

    def logprob(self, token: int, chain: int, top: int) -> TokenLogprob:
        """A made-up distribution in which `token` is always the most likely."""
        best = -(scramble(chain) % 1000) / 1000.0
        others = tuple(((token + i) % self.vocab_size, best - i) for i in range(top))
        return TokenLogprob(token, best, 1, others)

    def continuation(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        seed: int,
        *,
        eos_token_ids: Iterable[int] = (),
        max_model_len: int,
        adapter_digest: bytes = b"",
    ) -> list[int]:
        """What an engine must answer: all generated tokens, the one that ended it included."""
        tokens, chain = list(prompt), chain_start(adapter_digest)
        for token in prompt:
            chain = chain_next(chain, token)
        masked = (() if sampling.ignore_eos else tuple(eos_token_ids)) + sampling.stop_token_ids
        limit = max_model_len
        if sampling.max_tokens is not None:
            limit = min(limit, len(prompt) + sampling.max_tokens)
        while len(tokens) < limit:
            token = self.draw(tokens, chain, len(prompt), sampling, seed, masked)
            free_to_stop = len(tokens) - len(prompt) >= sampling.min_tokens
            tokens.append(token)
            chain = chain_next(chain, token)
            if free_to_stop and token in masked:
                break
        return tokens[len(prompt) :]

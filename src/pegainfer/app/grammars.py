"""The engine's grammars by llguidance; its import and its tokenizer wait for the first request with one."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pegainfer.contract.errors import RequestError
from pegainfer.contract.grammar import Matcher
from pegainfer.contract.request import GrammarSpec
from pegainfer.frontend.grammar.compiler import new_matcher
from pegainfer.frontend.grammar.vocabulary import Vocabulary, ll_tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_THREADS = 8
MAX_KEPT = 256  # compiled grammars
MAX_KEPT_BYTES = 4 << 20  # of their texts; compiled, a large schema takes 30 times as much
# A mask takes about 13 µs (49,152 tokens), so threads pay from so many on, and only on cores that the kernels
# of a CPU engine can spare.
PARALLEL_FROM = 16
CORES_PER_THREAD = 4


class LLGuidanceMatcher:
    """Implements contract.grammar.Matcher."""

    __slots__ = ("inner",)

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner

    def copy(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self.inner.deep_copy())

    def accept(self, token: int) -> bool:
        return self.inner.consume_token(token)

    def terminated(self) -> bool:
        return self.inner.is_stopped()


class LLGuidanceGrammars:
    """Implements contract.grammar.GrammarFactory."""

    def __init__(self, load: Callable[[], Vocabulary], vocab_size: int) -> None:
        """
        Args:
            load: reads the model's vocabulary; called once, on the compiling thread.
            vocab_size: of the logits, which may be padded beyond the vocabulary.
        """
        self._load = load
        self._num_bytes = -(-vocab_size // 32) * 4
        self._no_end = np.full(self._num_bytes, 0xFF, np.uint8)  # a mask of all but the end's tokens
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()  # matchers that have accepted nothing
        self._kept_bytes = 0

    def known(self, spec: GrammarSpec) -> LLGuidanceMatcher | None:
        with self._lock:
            kept = self._kept.get(spec.text)
            if kept is None:
                return None
            self._kept.move_to_end(spec.text)
            return LLGuidanceMatcher(kept.deep_copy())

    def compile(self, spec: GrammarSpec) -> LLGuidanceMatcher:
        import llguidance

        if self._tokenizer is None:
            vocabulary = self._load()
            for token in vocabulary.eos_ids:
                self._no_end[token >> 3] &= ~(1 << (token & 7)) & 0xFF
            self._tokenizer = ll_tokenizer(vocabulary)
            threads = len(os.sched_getaffinity(0)) // CORES_PER_THREAD
            if threads > 1:
                self._executor = llguidance.LLExecutor(num_threads=min(threads, MAX_THREADS))
        matcher = new_matcher(self._tokenizer, spec.text)
        if matcher.is_error():
            raise RequestError("the grammar does not compile", got=matcher.get_error()[:200], param="grammar")
        with self._lock:
            self._kept_bytes += 0 if spec.text in self._kept else len(spec.text)
            self._kept[spec.text] = matcher
            while len(self._kept) > MAX_KEPT or (self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1):
                self._kept_bytes -= len(self._kept.popitem(last=False)[0])
        return LLGuidanceMatcher(matcher.deep_copy())

    def masks(self, matchers: Sequence[Matcher], *, ends: Sequence[bool]) -> list[bytes | None]:
        inners = [m.inner for m in matchers if isinstance(m, LLGuidanceMatcher)]
        assert len(inners) == len(matchers) and self._tokenizer is not None
        width = -(-self._tokenizer.vocab_size // 32) * 4
        out = np.zeros((len(inners), max(width, self._num_bytes)), np.uint8)
        if self._executor is None or len(inners) < PARALLEL_FROM:
            first, stride = out.ctypes.data, out.shape[1]
            for i, inner in enumerate(inners):
                inner.unsafe_compute_mask_ptr(first + i * stride, width)
        else:
            numbered = [(inner, i) for i, inner in enumerate(inners)]
            part = np.empty((len(inners), width), np.uint8)
            self._executor.unsafe_compute_mask_ptr(numbered, part.ctypes.data, width, len(part))
            out[:, :width] = part
        rows = out[:, : self._num_bytes]
        for row, may_end in zip(rows, ends, strict=True):
            if not may_end:
                row &= self._no_end
        some = np.asarray(rows.any(axis=1)).tolist()
        return [
            row.tobytes() if any_allowed and not inner.is_error() else None
            for row, inner, any_allowed in zip(rows, inners, some, strict=True)
        ]

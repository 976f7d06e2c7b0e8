"""What the routes share: the engine, the text tools, the limits and the counters."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import RequestError
from pegainfer.contract.handle import EngineHandle
from pegainfer.frontend.block_hashes import BlockHashes
from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.grammar.cache import GrammarCache
from pegainfer.frontend.grammar.vocabulary import vocabulary_of
from pegainfer.frontend.http.answer.generation import Generation, Prompt, most_logprobs_bytes
from pegainfer.frontend.http.answer.registry import KeepAlive, Registry
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.observation.metrics import FrontMetrics, MetricsPage
from pegainfer.frontend.http.observation.observed import note_stage
from pegainfer.frontend.http.observation.tracing import Tracing
from pegainfer.frontend.http.request.limits import Gate, Held, bad_value
from pegainfer.frontend.http.request.sampling_defaults import (
    CHAT_DEFAULTS,
    COMPLETION_DEFAULTS,
    CUTS,
    OPENAI_COMPLETION_DEFAULTS,
    SamplingDefaults,
)
from pegainfer.frontend.http.responses_api.store import ResponseStore
from pegainfer.frontend.own_pooling import OwnPooling
from pegainfer.frontend.pool import WorkerPool
from pegainfer.frontend.tokenizer import Tokenizer
from pegainfer.frontend.tools.enforce import split_markers
from pegainfer.frontend.tools.styles import choose_reasoning, choose_style
from pegainfer.frontend.worker import Setup
from pegainfer.frontend.yes_no import YesNo

T = TypeVar("T")

LARGE_BYTES = 1 << 20  # a longer text waits for others such: it takes seconds and up to 300 bytes a character
USUAL_CHARS = 4  # a token of an ordinary text has
INLINE_BYTES = 4096  # text of a smaller request is handled on the event loop: about a millisecond at most


@dataclass(kw_only=True)
class Front:
    engine: EngineHandle
    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model has none, chat answers 400
    config: HttpConfig
    responses: ResponseStore  # several models of one server share it
    names: tuple[str, ...]  # the model's served names, the first one is answered
    chat_defaults: SamplingDefaults = CHAT_DEFAULTS
    own_pooling: OwnPooling = field(default_factory=OwnPooling)  # what the model's files say of vectors
    created: int = field(default_factory=lambda: int(time.time()))
    registry: Registry = field(default_factory=Registry)
    metrics: FrontMetrics = field(default_factory=FrontMetrics)
    tracing: Tracing | None = None  # None: this server keeps no traces

    def __post_init__(self) -> None:
        openai = self.config.openai_defaults
        self.completion_defaults = OPENAI_COMPLETION_DEFAULTS if openai else COMPLETION_DEFAULTS
        cuts = {name: getattr(self.chat_defaults, name) for name in CUTS}
        # Completions are greedy by default; a request with a temperature draws as the model says.
        self.drawn_completion_defaults = msgspec.structs.replace(self.completion_defaults, **cuts)
        source = None if self.template is None else self.template.all_source
        self.style = choose_style(self.config.tool_call_parser, source)
        self.reasoning = choose_reasoning(self.config.reasoning_parser, source)
        self.workers = WorkerPool(self._worker_setup, self.config.worker_processes)
        self.grammars = GrammarCache(self.workers, self.config.grammar_seconds)
        self.gate = Gate(self.config)
        self.held = Held(self.config)
        kept = self.config.max_kept_prompt_bytes
        self.tokenizer.pieces.limit(kept // 5 * 4)  # some 1,000 bytes a prompt's piece, 250 of hashes
        self.block_hashes = BlockHashes(kept // 5)
        self.keep_alive = KeepAlive(self.registry, self.config.keep_alive_seconds)
        self.large_texts = asyncio.Lock()
        self.serial = itertools.count()  # of the engine's requests
        self.page = MetricsPage(
            self.metrics, self.engine, self.tokenizer.pieces, self.names[0], self.config.metrics_prefix
        )

    def _worker_setup(self) -> Setup:
        template = self.template
        return Setup(
            vocabulary_of(self.tokenizer),
            None if template is None else template.source,
            dict(self.tokenizer.config.special_tokens),
            None if template is None else template.tool_source,
        )

    def special_id(self, token: str) -> int | None:
        """The id of a special token; None for what is none."""
        return self.tokenizer.special_id(token)

    def marker_ids(self, *, tools: bool) -> frozenset[int]:
        """Special tokens that the parsers of an answer must see."""
        texts = list(self.style.markers) if tools else []
        if self.reasoning is not None:
            texts += [self.reasoning.start, self.reasoning.end]
        ids = (self.special_id(part) for text in texts for part in split_markers(text))
        return frozenset(i for i in ids if i is not None)

    @property
    def end_of_thoughts(self) -> int | None:
        """The id of the token that ends the model's reasoning, where it is one token."""
        return None if self.reasoning is None else self.tokenizer.token_id(self.reasoning.end)

    @functools.cached_property
    def yes_no(self) -> YesNo:
        """Prompts for scores. Raises UnsupportedError where the model cannot be asked for yes or no."""
        return YesNo(self.tokenizer, self.template)

    @functools.cached_property
    def late_systems(self) -> bool:
        """Whether the template shows what a system says after the beginning of a conversation."""
        if self.template is None:
            return True
        said = "said-by-the-system"
        roles = ("user", "system", "assistant", "user", "system", "user")
        turns = [{"role": r, "content": said if r == "system" else "something"} for r in roles]
        try:
            return self.template.render(turns, now=datetime.datetime.now()).count(said) == roles.count(
                "system"
            )
        except RequestError:
            return False

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) for a model that is not served. None means the one that is."""
        if name is not None and name not in self.names and self.adapter(name) is None:
            known = ", ".join([*self.names, *(a.name for a in self.engine.adapters())])
            raise ApiError(
                404, f"model: expected {known}, got {name!r}", param="model", code="model_not_found"
            )

    def adapter(self, name: str | None) -> AdapterInfo | None:
        """The adapter that a request names as its model; None for the model itself."""
        adapters = self.engine.adapters()
        return next((a for a in adapters if a.name == name), None) if adapters else None

    def answered_name(self, adapter: str | None) -> str:
        """The model's name in an answer."""
        return self.names[0] if adapter is None else adapter

    def check_counted(self, param: str, text: str) -> None:
        """Bounds a text that is tokenised however many tokens it has: that takes 80 to 300 bytes a character.

        Raises ApiError (400).
        """
        most = max(self.config.max_counted_chars, USUAL_CHARS * self.engine.info.max_model_len)
        if len(text) > most:
            remedy = "send it in parts, or start the server with a larger --max-counted-chars"
            raise bad_value(param, f"≤ {most} characters", f"{len(text)}; {remedy}")

    async def text_work(self, size: int, work: Callable[[], T], stage: str = "tokenize") -> T:
        """Runs tokenisation and the like, off the event loop where `size` (bytes of the request) is large.

        Of the largest texts one is worked on at a time, so that they leave threads and memory to others.

        Args:
            stage: of host_seconds that the work belongs to.
        """
        if size <= INLINE_BYTES:
            return await self.timed(stage, _at_once(work))
        alone = stage == "tokenize" and size > LARGE_BYTES
        async with self.large_texts if alone else contextlib.nullcontext():
            return await self.timed(stage, asyncio.to_thread(work))

    async def timed(self, stage: str, work: Awaitable[T]) -> T:
        """Waits for work whose time counts as a stage of host_seconds."""
        start = time.monotonic()
        try:
            return await work
        finally:
            spent = time.monotonic() - start
            self.metrics.host_seconds[stage] += spent
            note_stage(stage, spent)

    def generation(self, id: str, prompts: list[Prompt], arrival: float) -> Generation:
        """A generation that `start` will submit. Raises ApiError (400) for one that could grow too large."""
        need = most_logprobs_bytes(prompts, self.engine.info.max_model_len)
        if need > self.config.max_logprobs_bytes:
            raise bad_value(
                "logprobs",
                f"≤ {self.config.max_logprobs_bytes} bytes of them in one answer",
                f"up to {need}; ask for fewer alternatives, continuations or tokens",
            )
        return Generation(
            id,
            prompts,
            engine=self.engine,
            gate=self.gate,
            registry=self.registry,
            metrics=self.metrics,
            arrival=arrival,
            model=self.names[0],
        )


def new_store(config: HttpConfig) -> ResponseStore:
    """For responses that are kept, with the bounds of the configuration."""
    return ResponseStore(
        most=config.max_stored_responses, most_bytes=config.max_stored_bytes, seconds=config.stored_seconds
    )


async def _at_once(work: Callable[[], T]) -> T:
    return work()

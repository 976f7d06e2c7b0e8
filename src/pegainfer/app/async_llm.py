"""The offline API for asyncio programs: answers come while they are written, and may be given up."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from pegainfer.app.cache import DEFAULT_MODEL
from pegainfer.app.continuation import make_request
from pegainfer.app.engine_slot import EngineSlot, make_engine, weight_files
from pegainfer.app.llm_options import read_options
from pegainfer.app.metrics import Metric, metrics_of
from pegainfer.app.outputs import RequestOutput
from pegainfer.app.prompts import PromptType, encode_prompt
from pegainfer.app.sampling_params import RequestOutputKind, SamplingParams
from pegainfer.app.structured import GrammarMaker
from pegainfer.app.text import TextSide
from pegainfer.contract.errors import PegaError, RequestError
from pegainfer.contract.event import EngineStats, TokenEvent
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.frontend.http.request.generation_config import stated
from pegainfer.frontend.tokenizer import Tokenizer


class AsyncEngineArgs:
    """The options of an AsyncLLM, for programs that keep them apart from it."""

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL.name, **options: Any) -> None:
        self.model = model
        self.options: Mapping[str, Any] = options


class AsyncLLM:
    """A model in this process for asyncio programs. An async context manager; `shutdown` frees the model.

    Args:
        model, options: as LLM takes them. Loading blocks.

    Raises as LLM.
    """

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL.name, **options: Any) -> None:
        found = read_options(model, options, {})  # somebody waits for each token, unlike with LLM
        text = found.text()
        make = partial(make_engine, found, text.tokenizer)
        self._adopt(EngineSlot(make(), make, weight_files(found.model.path)), text)

    @classmethod
    def from_engine_args(cls, args: AsyncEngineArgs) -> Self:
        return cls(args.model, **args.options)

    @classmethod
    def over(cls, engine: InProcessEngine, text: TextSide) -> Self:
        """The API over a running engine, which is closed with it."""
        llm = cls.__new__(cls)
        llm._adopt(EngineSlot(engine, None), text)
        return llm

    def _adopt(self, slot: EngineSlot, text: TextSide) -> None:
        self._slot = slot
        self._text = text
        self._grammars = GrammarMaker(text.tokenizer)
        self._numbers = itertools.count(1)

    @property
    def _engine(self) -> InProcessEngine:
        return self._slot.engine

    def get_tokenizer(self) -> Tokenizer:
        return self._text.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What holds where none are given: what the model itself says of sampling, else SamplingParams()."""
        return SamplingParams(**stated(self._text.generation))

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Continues one prompt. Each output has what there is so far, or what is new, or is the last one, by
        `sampling_params.output_kind`; the last one is `finished`.

        Leaving the iteration cancels the request, once the generator is closed (`contextlib.aclosing`).

        Args:
            prompt: a text, token ids, or a dict with `prompt` or `prompt_token_ids`.
            request_id: of no other request that is under way; None: one is made up.
            priority: lower runs first.

        Raises RequestError for a faulty prompt or parameter, and what the engine refuses or fails with.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        encoded = await asyncio.to_thread(encode_prompt, prompt, self._text.tokenizer)
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise RequestError("bad request_id", expected="a text", got=f"{request_id!r:.80}")
        name = request_id or f"async-llm-{next(self._numbers)}"
        engine = self._engine
        request = await asyncio.to_thread(
            make_request, name, encoded, params, priority, self._text.tokenizer, self._grammars,
            engine.info.max_model_len - 1,
        )  # fmt: skip
        kind = params.output_kind
        loop, events = asyncio.get_running_loop(), asyncio.Queue[TokenEvent]()

        def sink(event: TokenEvent) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        engine.submit(request.to_engine(), sink)
        done = cancel = False
        try:
            while not done:
                event = await events.get()
                done, cancel = request.take(event)
                while not done and not events.empty():  # what came meanwhile goes into the same output
                    done, cancel = request.take(events.get_nowait())
                if done or kind is not RequestOutputKind.FINAL_ONLY:
                    yield request.output(delta=kind is RequestOutputKind.DELTA)
        finally:
            if cancel or not done:
                engine.cancel(name)

    async def abort(self, request_id: str) -> None:
        """Ends a request; its iteration ends with the finish reason 'abort'. Unknown ids do nothing."""
        self._engine.cancel(request_id)

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; true once that is done. Raises EngineDeadError."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[PegaError | None] = loop.create_future()

        def done(error: PegaError | None) -> None:
            loop.call_soon_threadsafe(ended.set_result, error)

        self._engine.reset_prefix_cache(done)
        error = await ended
        if error is not None:
            raise error
        return True

    async def sleep(self, level: int = 1) -> None:
        """Takes no more requests, waits for those under way, then frees weights and KV cache.

        See EngineSlot.sleep. Raises ConfigError.
        """
        await asyncio.to_thread(self._slot.sleep, level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Loads the model again after `sleep`. Raises as LLM, and ConfigError for tags other than all."""
        await asyncio.to_thread(self._slot.wake_up, tags)

    async def is_sleeping(self) -> bool:
        return self._slot.asleep

    def get_metrics(self) -> list[Metric]:
        """The engine's counters by their names in /metrics."""
        return metrics_of(self._engine.stats())

    def stats(self) -> EngineStats:
        """Counters of the engine: steps, preemptions, cached tokens and more."""
        return self._engine.stats()

    def shutdown(self) -> None:
        """Aborts what is under way, ends the engine's thread and frees the model. Idempotent."""
        self._slot.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

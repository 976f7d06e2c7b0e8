"""The offline API: a model in this process, prompts in, texts out, in order."""

from __future__ import annotations

import os
import queue
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from pegainfer.app.assemble import build_engine
from pegainfer.app.cache import DEFAULT_MODEL
from pegainfer.app.chats import Message, Rendering, as_chats
from pegainfer.app.continuation import Request, Running
from pegainfer.app.embedding import EmbeddingRequest, EmbeddingRequestOutput
from pegainfer.app.llm_options import OFFLINE, read_options
from pegainfer.app.lora import LoRARequest, load_missing, wait
from pegainfer.app.outputs import RequestOutput
from pegainfer.app.prompts import Prompt, PromptType, as_list, encode_prompt
from pegainfer.app.sampling_params import SamplingParams
from pegainfer.app.text import TextSide, make_template
from pegainfer.app.text_options import TextOptions
from pegainfer.contract.errors import ConfigError, PegaError, RequestError
from pegainfer.contract.event import EngineStats, TokenEvent
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.frontend.http.generation_config import stated
from pegainfer.frontend.tokenizer import Tokenizer


class LLM:
    """A model for offline use. A context manager; `close` frees the model.

    Args:
        model: the default model's name, a .gguf file, a folder with config.json, safetensors and
            tokenizer.json, or owner/model of the hub, which is fetched.
        options: those of docs/options.md that are marked for it, by their names or other engines' names:
            device, max_model_len, max_num_seqs, activation_dtype, kv_cache_dtype, seed and more; revision,
            download_dir and offline of a model of the hub; tokenizer, chat_template,
            default_chat_template_kwargs, generation_config and override_generation_config, the last two and
            the variables as mappings or JSON.

    Raises ConfigError for an unknown option or model, ModelFileError and UnsupportedError for a model that
    cannot be loaded.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL.name,
        **options: Any,
    ) -> None:
        found = read_options(model, options, OFFLINE)
        text = found.text()
        scheduler = found.scheduler
        engine = build_engine(
            found.model.path,
            found.model.name,
            found.engine,
            scheduler,
            tokenizer=found.text_options.tokenizer,
        )
        policy = engine.policy(scheduler)
        running = InProcessEngine(engine.runner, engine.info, scheduler, policy=policy)
        self._adopt(running, text, scheduler)

    @classmethod
    def over(cls, engine: InProcessEngine, text: TextSide, scheduler: SchedulerConfig) -> Self:
        """The API over a running engine, which is closed with it."""
        llm = cls.__new__(cls)
        llm._adopt(engine, text, scheduler)
        return llm

    def _adopt(self, engine: InProcessEngine, text: TextSide, scheduler: SchedulerConfig) -> None:
        self._engine = engine
        self._text = text
        # Enough to fill every slot while those before are finishing; the rest waits here, not in the engine.
        self._max_live = min(2 * engine.info.max_slots, scheduler.max_waiting_requests)
        self._max_live_tokens = scheduler.max_waiting_tokens
        self._requests = 0
        # Also where nobody calls `close`: when the object goes, or at the interpreter's end.
        self._closer = weakref.finalize(self, engine.close)

    def get_tokenizer(self) -> Tokenizer:
        return self._text.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What holds where none are given: what the model itself says of sampling, else SamplingParams()."""
        return SamplingParams(**stated(self._text.generation))

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt; results come in the prompts' order.

        Args:
            prompts: a text, token ids, a dict with `prompt` or `prompt_token_ids`, or a list of such.
            sampling_params: one for all, or one a prompt; None: get_default_sampling_params().
            use_tqdm: shows a progress bar where standard error is a terminal.
            priority: one a prompt, lower runs first.
            lora_request: one for all, or one a prompt; None: the model itself. Needs enable_lora.

        Raises RequestError that names the prompt at fault; the others are then cancelled.
        """
        tokenizer = self._text.tokenizer
        encoded = [_numbered(i, encode_prompt, p, tokenizer) for i, p in enumerate(as_list(prompts))]
        return self._run(encoded, sampling_params, use_tqdm, priority, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, a list of {'role', 'content'}, or each of a list of conversations.

        Messages and tools are those of /v1/chat/completions; a template that knows no tools gets them in the
        system turn. Calls are left in the text as the model writes them.

        Args:
            chat_template: takes the place of the model's own: as the option of that name, see TextOptions.
            chat_template_kwargs: variables of the template, e.g. enable_thinking.

        Raises as `generate`, and ConfigError where the model has no chat template.
        """
        template = self._text.template
        if chat_template is not None:
            template = make_template(self._text.tokenizer, TextOptions(chat_template=chat_template))
        if template is None:
            raise ConfigError("the model has no chat template", remedy="use generate with a text")
        rendering = Rendering(
            template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )

        def encode(chat: Any) -> Prompt:
            return encode_prompt(rendering.text(chat), self._text.tokenizer, add_special_tokens=False)

        encoded = [_numbered(i, encode, chat) for i, chat in enumerate(as_chats(messages))]
        return self._run(encoded, sampling_params, use_tqdm, None, lora_request)

    def unload_lora(self, name: str) -> None:
        """Forgets an adapter. Raises RequestError for one that is not loaded."""
        wait(partial(self._engine.unload_adapter, name))

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling: Literal["mean", "last"] = "mean",
        normalize: bool = True,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """One vector a prompt, in the prompts' order: `outputs.embedding`, [hidden size] float32.

        Args:
            prompts: as `generate` takes them.
            pooling: the mean of the prompt's hidden states, or the last one.
            normalize: scales each vector to length 1.

        Raises RequestError that names the prompt at fault, and for an unknown pooling.
        """
        tokenizer = self._text.tokenizer
        encoded = [_numbered(i, encode_prompt, p, tokenizer) for i, p in enumerate(as_list(prompts))]
        requests = [EmbeddingRequest(self._next_id(), prompt, pooling, normalize) for prompt in encoded]
        self._finish(requests, use_tqdm)
        return [r.output() for r in requests]

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; true once that is done. Raises EngineDeadError."""
        ended: queue.SimpleQueue[PegaError | None] = queue.SimpleQueue()
        self._engine.reset_prefix_cache(ended.put)
        error = ended.get()
        if error is not None:
            raise error
        return True

    def stats(self) -> EngineStats:
        """Counters of the engine: steps, preemptions, cached tokens and more."""
        return self._engine.stats()

    def close(self) -> None:
        """Ends the engine's thread and frees the model. Idempotent."""
        self._closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        show: bool,
        priority: Sequence[int] | None,
        lora: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[RequestOutput]:
        sampling = self.get_default_sampling_params() if sampling is None else sampling
        params = _spread("sampling_params", sampling, len(prompts))
        priorities = _spread("priority", 0 if priority is None else priority, len(prompts))
        adapters = _spread("lora_request", lora, len(prompts))
        load_missing(self._engine, adapters)
        requests = []
        for i, (prompt, p, rank, a) in enumerate(zip(prompts, params, priorities, adapters, strict=True)):
            name = None if a is None else a.lora_name
            requests.append(
                _numbered(i, Request, self._next_id(), prompt, p, rank, self._text.tokenizer, name)
            )
        self._finish(requests, show)
        return [r.output() for r in requests]

    def _next_id(self) -> str:
        self._requests += 1
        return f"llm-{self._requests}"

    def _finish(self, requests: Sequence[Running], show: bool) -> None:
        """Submits the requests, a window at a time, and takes events until all have ended."""
        from pegainfer.app.progress import counting

        live: dict[str, Running] = {}
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        waiting = deque(enumerate(requests))
        numbers = {r.id: i for i, r in enumerate(requests)}
        with counting("generate", len(requests), show) as advance:
            try:
                self._submit(waiting, live, events)
                while live:
                    event = events.get()
                    request = live.get(event.request_id)
                    if request is None:
                        continue  # cancelled after its last stop string
                    done, cancel = _numbered(numbers[request.id], request.take, event)
                    if cancel:
                        self._engine.cancel(request.id)
                    if done:
                        del live[request.id]
                        advance(request.num_tokens)
                        self._submit(waiting, live, events)
            finally:
                for request_id in live:
                    self._engine.cancel(request_id)

    def _submit(
        self,
        waiting: deque[tuple[int, Running]],
        live: dict[str, Running],
        events: queue.SimpleQueue[TokenEvent],
    ) -> None:
        """Fills the window: at least one request, then as many as the engine may let wait."""
        tokens = sum(r.prompt_tokens for r in live.values())
        while waiting and len(live) < self._max_live:
            number, request = waiting[0]
            tokens += request.prompt_tokens
            if live and tokens > self._max_live_tokens:
                return
            waiting.popleft()
            live[request.id] = request
            _numbered(number, self._engine.submit, request.to_engine(), events.put)


def _numbered(number: int, call: Any, *args: Any) -> Any:
    """Calls it; a RequestError gets the prompt's number into its message."""
    try:
        return call(*args)
    except RequestError as e:
        raise RequestError(f"prompt {number}: {e}", param=e.param) from None


def _spread(name: str, value: Any, count: int) -> list[Any]:
    """One value for all prompts, or a list of one each."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} and prompts differ in number", expected=count, got=len(value), param=name)
    return list(value)

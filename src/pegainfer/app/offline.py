"""The offline API: a model in this process, prompts in, texts out, in order."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from pegainfer.app.cache import DEFAULT_MODEL
from pegainfer.app.chats import Message, Rendering, as_chats
from pegainfer.app.continuation import Running, make_request
from pegainfer.app.embedding import EmbeddingRequest, EmbeddingRequestOutput
from pegainfer.app.engine_slot import EngineSlot, make_engine, weight_files
from pegainfer.app.llm_options import OFFLINE, read_options
from pegainfer.app.lora import LoRARequest, load_missing, wait
from pegainfer.app.metrics import Metric, metrics_of
from pegainfer.app.outputs import RequestOutput
from pegainfer.app.prompts import Prompt, PromptType, as_list, encode_prompt
from pegainfer.app.sampling_params import SamplingParams
from pegainfer.app.scores import ScoringRequestOutput, pairs_of, score_by_angle, score_by_answer
from pegainfer.app.structured import GrammarMaker
from pegainfer.app.text import TextSide, make_template
from pegainfer.app.text_options import TextOptions
from pegainfer.app.window import Window, numbered
from pegainfer.contract.errors import ConfigError, RequestError
from pegainfer.contract.event import EngineStats
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.frontend.http.request.generation_config import stated
from pegainfer.frontend.tokenizer import Tokenizer
from pegainfer.frontend.yes_no import MOST_LOGPROBS


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
        make = partial(make_engine, found, text.tokenizer)
        self._adopt(EngineSlot(make(), make, weight_files(found.model.path)), text, found.scheduler)

    @classmethod
    def over(cls, engine: InProcessEngine, text: TextSide, scheduler: SchedulerConfig) -> Self:
        """The API over a running engine, which is closed with it."""
        llm = cls.__new__(cls)
        llm._adopt(EngineSlot(engine, None), text, scheduler)
        return llm

    def _adopt(self, slot: EngineSlot, text: TextSide, scheduler: SchedulerConfig) -> None:
        self._slot = slot
        self._text = text
        self._scheduler = scheduler
        self._grammars = GrammarMaker(text.tokenizer)
        self._requests = 0
        # Also where nobody calls `close`: when the object goes, or at the interpreter's end.
        self._closer = weakref.finalize(self, slot.close)

    @property
    def _engine(self) -> InProcessEngine:
        return self._slot.engine

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
        encoded = [numbered(i, encode_prompt, p, tokenizer) for i, p in enumerate(as_list(prompts))]
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

        encoded = [numbered(i, encode, chat) for i, chat in enumerate(as_chats(messages))]
        return self._run(encoded, sampling_params, use_tqdm, None, lora_request)

    def unload_lora(self, name: str) -> None:
        """Forgets an adapter. Raises RequestError for one that is not loaded."""
        wait(partial(self._engine.unload_adapter, name))

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling: Literal["auto", "mean", "last"] = "auto",
        normalize: bool | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """One vector a prompt, in the prompts' order: `outputs.embedding`, [hidden size] float32.

        Args:
            prompts: as `generate` takes them.
            pooling: the mean of the prompt's hidden states, or the last one; auto: as the model's files say,
                else the mean.
            normalize: scales each vector to length 1; None: unless the model's files say otherwise.

        Raises RequestError that names the prompt at fault, and for an unknown pooling; UnsupportedError where
        the model's own pooling is not served.
        """
        own = self._text.pooling
        chosen = own.choose(pooling)
        scaled = own.normalize if normalize is None else normalize
        tokenizer = self._text.tokenizer
        encoded = [numbered(i, encode_prompt, p, tokenizer) for i, p in enumerate(as_list(prompts))]
        requests = [EmbeddingRequest(self._next_id(), prompt, chosen, scaled) for prompt in encoded]
        self._finish(requests, show=use_tqdm)
        return [r.output() for r in requests]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        score_method: Literal["auto", "yes-no", "cosine"] = "auto",
        instruction: str | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """How well texts fit each other, a score a pair: `outputs.score`.

        Args:
            text_1: one text for all of `text_2`, or as many, as queries.
            text_2: one text or several, as documents.
            score_method: as the model was trained to (auto); by its answer to a yes-or-no question, from 0 to
                1; or by the angle between embeddings, from -1 to 1.
            instruction: of the question; None: Qwen3-Reranker's own.

        Raises RequestError for faulty texts, UnsupportedError where the model cannot score.
        """
        pairs = pairs_of(text_1, text_2)
        finish = partial(self._finish, show=use_tqdm)
        method = self._text.pooling.choose_score(score_method)
        if method == "yes-no":
            top = min(MOST_LOGPROBS, self._engine.info.max_logprobs)
            return score_by_answer(finish, self._next_id, self._text, top, pairs, instruction)
        if instruction is not None:
            raise RequestError("no instruction where embeddings are compared", param="instruction")
        return score_by_angle(finish, self._next_id, self._text, pairs)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; true once that is done. Raises EngineDeadError."""
        wait(self._engine.reset_prefix_cache)
        return True

    def sleep(self, level: int = 1) -> None:
        """Frees weights and KV cache until `wake_up`; see EngineSlot.sleep. Adapters are loaded again when
        they are next named. Raises ConfigError."""
        self._slot.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Loads the model again after `sleep`. Raises as LLM, and ConfigError for tags other than all."""
        self._slot.wake_up(tags)

    def get_metrics(self) -> list[Metric]:
        """The engine's counters by their names in /metrics."""
        return metrics_of(self._engine.stats())

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
        longest = self._engine.info.max_model_len - 1
        make = partial(make_request, tokenizer=self._text.tokenizer, grammars=self._grammars, longest=longest)
        requests = []
        for i, (prompt, p, rank, a) in enumerate(zip(prompts, params, priorities, adapters, strict=True)):
            adapter = None if a is None else a.lora_name
            requests.append(numbered(i, make, self._next_id(), prompt, p, rank, adapter=adapter))
        self._finish(requests, show=show)
        return [r.output() for r in requests]

    def _finish(self, requests: Sequence[Running], *, show: bool) -> None:
        Window(self._engine, self._scheduler).finish(requests, show=show)

    def _next_id(self) -> str:
        self._requests += 1
        return f"llm-{self._requests}"


def _spread(name: str, value: Any, count: int) -> list[Any]:
    """One value for all prompts, or a list of one each."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} and prompts differ in number", expected=count, got=len(value), param=name)
    return list(value)

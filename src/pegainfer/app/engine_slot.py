"""An engine of this process that can be put to sleep: ended, and built again when it is woken up.

awake ─► sleep: no more requests, those under way end, the engine is freed ─► asleep ─► wake_up: built again
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from pegainfer.app.assemble import build_engine
from pegainfer.app.grammars import LLGuidanceGrammars
from pegainfer.app.llm_options import LLMOptions
from pegainfer.contract.errors import ConfigError, RequestError
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.frontend.grammar.vocabulary import vocabulary_of
from pegainfer.frontend.tokenizer import Tokenizer
from pegainfer.runtime.weights.gguf_split import model_of, number_of_parts, part_name

_TAGS = frozenset({"weights", "kv_cache"})


class EngineSlot:
    """Holds the engine of the moment. Calls of `sleep`, `wake_up` and `close` must not overlap."""

    def __init__(
        self, engine: InProcessEngine, make: Callable[[], InProcessEngine] | None, files: Iterable[Path] = ()
    ) -> None:
        """
        Args:
            engine: running; ended by `close`.
            make: builds another one like it; None: this engine cannot sleep.
            files: those that `make` reads weights from.
        """
        self._engine: InProcessEngine | None = engine
        self._make = make
        self._files = tuple(files)

    @property
    def engine(self) -> InProcessEngine:
        """Raises RequestError while it sleeps."""
        if self._engine is None:
            raise RequestError("the model is asleep", remedy="call wake_up")
        return self._engine

    @property
    def asleep(self) -> bool:
        return self._engine is None

    def sleep(self, level: int) -> None:
        """Waits for the requests under way, then frees weights and KV cache. Idempotent.

        Args:
            level: 1 asks the system to keep the weights' files in host memory, from where `wake_up` reads
                them; 2 lets it drop them, for a model that is not needed again soon.

        Raises ConfigError for another level, and for an engine that nobody knows how to build again.
        """
        if level not in (1, 2):
            raise ConfigError("bad level of sleep", expected="1 or 2", got=f"{level!r:.80}")
        if self._make is None:
            raise ConfigError("this engine cannot sleep", remedy="make the LLM from a model's name or path")
        if self._engine is not None:
            self._engine.drain()
            self._engine.wait_drained()
            self._engine.close()
            self._engine = None
            gc.collect()  # an engine's parts refer to each other
        advice = os.POSIX_FADV_WILLNEED if level == 1 else os.POSIX_FADV_DONTNEED
        for file in self._files:
            with contextlib.suppress(OSError), file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, advice)

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Builds the engine again; nothing where it is awake.

        Args:
            tags: None, or both weights and kv_cache: an engine is built as a whole.

        Raises ConfigError for other tags, and what loading the model raises.
        """
        if tags is not None and frozenset(tags) != _TAGS:
            raise ConfigError("bad tags", expected="None, or weights and kv_cache", got=f"{tags!r:.80}")
        if self._engine is None and self._make is not None:
            self._engine = self._make()

    def close(self) -> None:
        """Ends the engine; it cannot be woken up again. Idempotent."""
        self._make = None
        if self._engine is not None:
            self._engine.close()


def make_engine(found: LLMOptions, tokenizer: Tokenizer) -> InProcessEngine:
    """Loads a model and starts its engine. Raises as `build_engine`."""
    built = build_engine(
        found.model.path,
        found.model.name,
        found.engine,
        found.scheduler,
        tokenizer=found.text_options.tokenizer,
    )
    grammars = LLGuidanceGrammars(partial(vocabulary_of, tokenizer), built.info.vocab_size)
    policy = built.policy(found.scheduler)
    return InProcessEngine(
        built.runner, built.info, found.scheduler, policy=policy, grammars=grammars, peers=built.peers
    )


def weight_files(path: Path) -> list[Path]:
    """The files with a model's weights: of a folder its safetensors, else all parts of a GGUF file."""
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    model = model_of(path.name)
    if model is None:
        return [path]
    count = number_of_parts(path.name)
    return [path.parent / part_name(model, number, count) for number in range(count)]

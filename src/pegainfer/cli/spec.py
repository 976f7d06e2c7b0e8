"""What an engine is made from, as plain data, and the making of it. Imports no command-line library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pegainfer.app.config import EngineConfig
from pegainfer.contract.errors import ConfigError
from pegainfer.engine.config import SchedulerConfig

if TYPE_CHECKING:
    from pegainfer.app.assemble import Engine
    from pegainfer.contract.grammar import GrammarFactory
    from pegainfer.contract.handle import EngineInfo
    from pegainfer.frontend.grammar.vocabulary import Vocabulary
    from pegainfer.measure.profile import Profiler

LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"  # of every process


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that an engine process must know; crosses to it as JSON.

    name: what the model is called in answers.
    path: of the model's file or folder; empty on the null device.
    time_ops: the ops of sampled steps are timed while a trace is taken.
    gentle: it is loaded at a low priority, beside other engines that answer requests.
    tokenizer: of the folder or file that takes the place of the model's own tokenizer; empty: its own.
    """

    name: str
    path: str
    engine: EngineConfig
    scheduler: SchedulerConfig
    time_ops: bool = False
    gentle: bool = False
    tokenizer: str = ""

    @property
    def is_null(self) -> bool:
        return not self.path


def build(spec: EngineSpec, profiler: Profiler | None = None) -> Engine:
    """Loads the model in this process. Raises ConfigError, ModelFileError, UnsupportedError.

    Args:
        profiler: is put around the backend; the null device has none.
    """
    if spec.is_null:
        return _build_null(spec)
    from pegainfer.app.assemble import build_engine

    return build_engine(
        Path(spec.path),
        spec.name,
        spec.engine,
        spec.scheduler,
        profiler,
        tokenizer=_tokenizer(spec),
    )


def make_grammars(spec: EngineSpec, info: EngineInfo) -> GrammarFactory:
    """The engine's grammars; its tokenizer is read when the first request with one comes."""
    from pegainfer.app.grammars import LLGuidanceGrammars

    return LLGuidanceGrammars(lambda: _vocabulary(spec), info.vocab_size)


def _vocabulary(spec: EngineSpec) -> Vocabulary:
    from pegainfer.frontend.grammar.vocabulary import vocabulary_of

    if spec.is_null:
        from pegainfer.frontend.byte_tokenizer import byte_tokenizer

        return vocabulary_of(byte_tokenizer())
    from pegainfer.app.resolve import resolve
    from pegainfer.app.text import load_text
    from pegainfer.app.text_options import TextOptions

    weights = spec.engine.load_format != "dummy"
    tokenizer = _tokenizer(spec)
    found = resolve(spec.path, weights=weights, text=tokenizer is None)
    return vocabulary_of(load_text(found, TextOptions(tokenizer=tokenizer)).tokenizer)


def _tokenizer(spec: EngineSpec) -> Path | None:
    """What takes the place of the model's own tokenizer."""
    return Path(spec.tokenizer) if spec.tokenizer else None


def _build_null(spec: EngineSpec) -> Engine:
    """The null device under the names and bounds that were asked for."""
    from pegainfer.app.assemble import Engine, engine_info
    from pegainfer.app.ranks import null_ranks
    from pegainfer.null.config import NullConfig

    if spec.engine.kv_offload or spec.engine.kv_offload_disk:
        raise ConfigError(
            "the null device keeps nothing that KV tiers could hold",
            got="kv_offload" if spec.engine.kv_offload else "kv_offload_disk",
            remedy="name a model",
        )
    if spec.engine.role != "both":
        raise ConfigError(
            "the null device has no blocks for peers", got=spec.engine.role, remedy="name a model"
        )
    defaults = NullConfig()
    data_ranks = spec.engine.data_parallel_size
    config = NullConfig(
        max_model_len=spec.engine.max_model_len or defaults.max_model_len,
        max_adapters=spec.engine.max_loras if spec.engine.enable_lora else 0,
        max_host_adapters=spec.engine.max_cpu_loras or spec.engine.max_loras,
        max_slots=-(-(spec.scheduler.max_slots or defaults.max_slots) // data_ranks),
    )
    runner = null_ranks(config, spec.engine.tensor_parallel_size, data_ranks)
    info = engine_info(runner.info, spec.name, "NullModel", "null", spec.scheduler.max_logprobs)
    return Engine(runner, info, kv_events=spec.engine.kv_events_config)

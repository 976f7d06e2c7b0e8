"""Which models a server has, where it has several: the flags, and what they name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pegainfer.app.config import EngineConfig
from pegainfer.cli.flags import Given
from pegainfer.cli.progress import say
from pegainfer.cli.spec import EngineSpec
from pegainfer.cli.target import ModelFlags, Target, choose, pick_device, text_options
from pegainfer.contract.errors import ConfigError
from pegainfer.engine.config import SchedulerConfig
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.runtime.weights.gguf_split import group_parts


@dataclass(frozen=True, kw_only=True)
class FleetFlags:
    """Of a server with several models: `serve A B`, or --models-dir."""

    models_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder of models, each a .gguf file or a folder with safetensors: all are served."
        },
    )
    keep_alive: float = field(
        default=300.0,
        metadata={
            "help": "One of several models is unloaded after so long without a request, as 300, 5m or 1h; 0: "
            "at once, -1: never.",
            "parse": "duration",
        },
    )
    max_loaded_models: int = field(
        default=0,
        metadata={"help": "Most models that are loaded at once; 0: as many as --models-memory holds."},
    )
    models_memory: int | None = field(
        default=None,
        metadata={
            "help": "Memory that all loaded models may take together, as 16GiB; default: nine tenths of what "
            "is free at the start. On a GPU it must be given, and --kv-cache-memory too.",
            "parse": "bytes",
        },
    )
    when_unloaded: Literal["wait", "refuse"] = field(
        default="wait",
        metadata={
            "help": "A request for a model that is not loaded waits for it, or gets a 503 with Retry-After "
            "while it is loaded."
        },
    )

    def __post_init__(self) -> None:
        if self.max_loaded_models < 0:
            raise ConfigError(
                "no such number of models", expected="0 or more", got=self.max_loaded_models,
                where="--max-loaded-models",
            )  # fmt: skip


# Flags that belong to one model, and what to do instead.
_OF_ONE = {
    "--model": "name all models as arguments",
    "--revision": "name a model that is here already",
    "--tokenizer": "leave it out",
    "--chat-template": "leave it out",
    "--served-model-name": "leave it out: each model has its own name",
    "--enable-lora": "start a server for the one model",
    "--lora-modules": "start a server for the one model",
    "--engine-restarts": "leave it out: a model whose engine died is loaded again when it is asked for",
    "--ready-seconds": "leave it out: one model that stands still does not make the server unready",
    "--trace": "start a server for the one model",
    "--role": "start a server for each model that has peers",
    "--prefill-peers": "start a server for each model that has peers",
    "--kv-offload-disk": "leave it out: a folder is one engine's",
    "--kv-events-config": "start a server for each model whose events are wanted",
}


def of_several(http: HttpConfig) -> HttpConfig:
    """The server's options without those of one model, which the environment may have set."""
    return dataclasses.replace(http, served_model_name=(), lora_modules=(), trace="")


def choose_all(
    references: Sequence[str],
    flags: ModelFlags,
    engine: EngineConfig,
    scheduler: SchedulerConfig,
    fleet: FleetFlags,
    given: Given,
) -> list[Target]:
    """Every model of the server, in the order given, then those of --models-dir.

    Raises ConfigError for flags that make no sense for several models, for names that two of them have, and
    what `choose` raises.
    """
    for flag, remedy in _OF_ONE.items():
        if flag in given and flag not in given.environment:
            raise ConfigError(f"{flag} does not apply to several models", remedy=remedy)
    if flags.device == "auto":
        flags = dataclasses.replace(flags, device=pick_device(engine))
    if flags.device == "cuda" and None in (fleet.models_memory, engine.kv_cache_memory):
        raise ConfigError(
            "the memory of several models on a GPU must be planned",
            expected="--models-memory and --kv-cache-memory", got="--device cuda without one of them",
        )  # fmt: skip
    # What the environment sets for one model is left aside.
    flags = dataclasses.replace(flags, model_path=None, revision=None, tokenizer=None, chat_template=None)
    engine = dataclasses.replace(
        engine, enable_lora=False, role="both", prefill_peers="", kv_offload_disk="", kv_events_config=""
    )
    targets = [_target(reference, flags, engine, scheduler, given) for reference in references]
    for path in [] if fleet.models_dir is None else _models_in(Path(fleet.models_dir).expanduser()):
        try:
            targets.append(_target(str(path), flags, engine, scheduler, given))
        except ConfigError as error:
            say(f"{path.name} is left out: {error}")
    if not targets:
        raise ConfigError("no models are there", got=fleet.models_dir, where="--models-dir")
    names = [target.spec.name for target in targets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError("two models have one name", got=twice)
    return targets


def _target(
    reference: str, flags: ModelFlags, engine: EngineConfig, scheduler: SchedulerConfig, given: Given
) -> Target:
    if flags.device == "null":  # any name: there is no model behind it
        spec = EngineSpec(name=reference, path="", engine=engine, scheduler=scheduler)
        return Target(spec, None, text_options(flags, ""))
    return choose(reference, flags, engine, scheduler, given)


def _models_in(folder: Path) -> list[Path]:
    """The .gguf files, of split ones the first part, and folders with a config.json. Raises ConfigError."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as e:
        raise ConfigError(f"cannot read the folder of models: {e.strerror}", where=folder) from None
    files = group_parts(entry.name for entry in entries if entry.suffix.lower() == ".gguf")
    folders = [entry for entry in entries if (entry / "config.json").is_file()]
    return sorted([*(folder / parts[0] for parts in files), *folders])

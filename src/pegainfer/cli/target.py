"""Which model on which device: the flags that all commands with a model share, and what they name."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pegainfer.app.cache import DEFAULT_MODEL
from pegainfer.app.config import EngineConfig
from pegainfer.app.resolve import ModelRef, resolve
from pegainfer.cli.flags import Given
from pegainfer.cli.progress import download_progress
from pegainfer.cli.spec import EngineSpec
from pegainfer.contract.errors import ConfigError
from pegainfer.engine.config import SchedulerConfig

if TYPE_CHECKING:
    from pegainfer.app.text import TextSide

MODEL_HELP = (
    "Model: owner/model of the Hugging Face hub (owner/model:QUANT for one of its GGUF files), a .gguf file, "
    f"a folder with safetensors, or {DEFAULT_MODEL.display_name} (the default)."
)


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Of every command that loads a model."""

    model_path: str | None = field(default=None, metadata={"help": MODEL_HELP})
    revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of a model of the hub; default: main."}
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "File of a chat template that takes the place of the model's own."}
    )
    offline: bool = field(default=False, metadata={"help": "Fetch nothing: models that are here already."})
    device: Literal["cpu", "cuda", "auto", "reference", "null"] = field(
        default="cpu",
        metadata={
            "help": "cpu; cuda: one NVIDIA GPU; auto: cuda where a GPU, its driver and kernels are there, "
            "else cpu; reference: NumPy, slow, what the others are compared with; null: no model at all, "
            "letters by arithmetic, for tests."
        },
    )


KV_FLAGS = ("--max-model-len", "--kv-cache-dtype", "--kv-cache-memory")
# Flags of EngineConfig that a device obeys.
APPLIES: dict[str, tuple[str, ...]] = {
    "cpu": (*KV_FLAGS, "--threads", "--isa", "--activation-dtype", "--tensor-parallel-size"),
    "cuda": (*KV_FLAGS, "--device-ordinal", "--gpu-memory-utilization", "--cuda-graph", "--load-format"),
    "reference": KV_FLAGS,
    "null": ("--max-model-len", "--tensor-parallel-size", "--data-parallel-size"),
}


@dataclass(frozen=True)
class Target:
    spec: EngineSpec
    model: ModelRef | None  # None on the null device
    chat_template: str | None = None  # a file, see ModelFlags


def choose(
    model: str | None,
    flags: ModelFlags,
    engine: EngineConfig,
    scheduler: SchedulerConfig,
    given: Given,
    *,
    text: bool = True,
) -> Target:
    """Checks the flags against the device and finds the model, which is fetched if it is missing.

    Args:
        text: whether a folder must have a tokenizer.

    Raises ConfigError, UnsupportedError, and what `resolve` and `pull` raise.
    """
    if model is not None and flags.model_path is not None and model != flags.model_path:
        raise ConfigError("two models", expected="MODEL or --model", got=f"{model} and {flags.model_path}")
    reference = model if model is not None else flags.model_path
    if flags.device == "null":
        if reference is not None:
            raise ConfigError("the null device has no model", got=reference, remedy="leave the model out")
        given.refuse(EngineConfig, "--device null", but=APPLIES["null"])
        return Target(EngineSpec(name="null", path="", engine=engine, scheduler=scheduler), None)
    device = flags.device if flags.device != "auto" else pick_device(engine)
    engine = dataclasses.replace(engine, backend=device)
    given.refuse(EngineConfig, f"--device {device}", but=APPLIES[device])
    engine.check_backend()
    with download_progress() as progress:
        found = resolve(
            DEFAULT_MODEL.name if reference is None else reference,
            fetch=True,
            progress=progress,
            weights=engine.load_format != "dummy",
            text=text,
            revision=flags.revision,
            offline=flags.offline,
        )
    spec = EngineSpec(name=found.name, path=str(found.path.absolute()), engine=engine, scheduler=scheduler)
    return Target(spec, found, flags.chat_template)


def pick_device(engine: EngineConfig) -> Literal["cpu", "cuda"]:
    """cuda where it can run, else cpu; says on standard error why not."""
    from pegainfer.app.gpu import why_not

    reason = why_not(engine)
    if reason is None:
        return "cuda"
    print(f"pegainfer: running on the CPU: {reason}", file=sys.stderr)
    return "cpu"


def load_text_side(target: Target) -> TextSide:
    """The tokenizer and chat template. Raises ModelFileError, UnsupportedError, ConfigError."""
    from pegainfer.app.text import TextSide, load_text

    if target.model is not None:
        return load_text(target.model, Path(target.chat_template) if target.chat_template else None)
    from pegainfer.frontend.byte_tokenizer import byte_tokenizer
    from pegainfer.frontend.chat_template import ChatTemplate

    tokenizer = byte_tokenizer()
    assert tokenizer.chat_template is not None
    return TextSide(tokenizer, ChatTemplate(tokenizer.chat_template, tokenizer.config.special_tokens))

"""Which model on which device: the flags that all commands with a model share, and what they name."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from pegainfer.app.cache import DEFAULT_MODEL
from pegainfer.app.config import EngineConfig
from pegainfer.app.resolve import ModelRef, find_tokenizer, resolve
from pegainfer.app.text_options import TextOptions, read_variables
from pegainfer.cli.flags import Given
from pegainfer.cli.progress import download_progress, say
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

    config: str | None = field(
        default=None,
        metadata={
            "help": "YAML file of options, named as the flags without --. What is typed goes before the "
            "environment (PEGAINFER_ and the option's name in capitals), and that before the file."
        },
    )
    model_path: str | None = field(default=None, metadata={"help": MODEL_HELP})
    revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of a model of the hub; default: main."}
    )
    tokenizer: str | None = field(
        default=None,
        metadata={
            "help": "Folder with tokenizer.json, .gguf file or name of the hub whose tokenizer and chat "
            "template take the place of the model's own."
        },
    )
    chat_template: str | None = field(
        default=None,
        metadata={
            "help": "What takes the place of the model's chat template: a file, the name of one of the "
            "model's own templates, such as tool_use, or the template itself."
        },
    )
    default_chat_template_kwargs: str = field(
        default="",
        metadata={
            "help": 'JSON object of template variables that requests need not set, as {"enable_thinking": '
            "false}; requests go before it."
        },
    )
    download_dir: str | None = field(
        default=None, metadata={"help": "Folder for models of the hub; default: that library's own cache."}
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


LORA_FLAGS = ("--enable-lora", "--max-loras", "--max-cpu-loras", "--max-lora-rank")
KV_FLAGS = ("--max-model-len", "--kv-cache-dtype", "--state-dtype", "--kv-cache-memory", "--kv-events-config")
# check_backend refuses more than one rank where a device has no more.
RANK_FLAGS = ("--tensor-parallel-size", "--data-parallel-size")
# Tiers and peers are built for every device with blocks, app/tiers.py.
TIER_FLAGS = ("--kv-offload", "--kv-offload-disk", "--snapshot-share")
PEER_FLAGS = ("--role", "--peer-listen", "--prefill-peers", "--peer-secret-file", "--peer-timeout")
# Flags of EngineConfig that a device obeys.
APPLIES: dict[str, tuple[str, ...]] = {
    "cpu": (
        *KV_FLAGS,
        *LORA_FLAGS,
        *RANK_FLAGS,
        *TIER_FLAGS,
        *PEER_FLAGS,
        "--enable-expert-parallel",
        "--threads",
        "--isa",
        "--load-format",
        "--expert-stats",
        "--activation-dtype",
        "--quantization",
    ),
    "cuda": (
        *KV_FLAGS,
        *LORA_FLAGS,
        *RANK_FLAGS,
        *TIER_FLAGS,
        *PEER_FLAGS,
        "--enable-expert-parallel",
        "--device-ordinal",
        "--share-gpu",
        "--gpu-memory-utilization",
        "--cuda-graph",
        "--load-format",
        "--expert-stats",
        "--activation-dtype",
        "--quantization",
    ),
    "reference": (
        *KV_FLAGS,
        *LORA_FLAGS,
        *RANK_FLAGS,
        *TIER_FLAGS,
        *PEER_FLAGS,
        "--load-format",
        "--expert-stats",
        "--quantization",
    ),
    "null": ("--max-model-len", "--kv-events-config", *LORA_FLAGS, *RANK_FLAGS),
}


class Target(msgspec.Struct, frozen=True):
    spec: EngineSpec
    model: ModelRef | None  # None on the null device
    text: TextOptions


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
        spec = EngineSpec(name="null", path="", engine=engine, scheduler=scheduler)
        return Target(spec, None, text_options(flags, ""))
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
            text=text and flags.tokenizer is None,
            revision=flags.revision,
            offline=flags.offline,
            download_dir=flags.download_dir,
            tell=say,
        )
    spec = EngineSpec(
        name=found.name,
        path=str(found.path.absolute()),
        engine=engine,
        scheduler=scheduler,
        tokenizer=_tokenizer(flags),
    )
    return Target(spec, found, text_options(flags, spec.tokenizer))


def text_options(flags: ModelFlags, tokenizer: str) -> TextOptions:
    """What the flags say of the text side. Raises ConfigError."""
    return TextOptions(
        tokenizer=Path(tokenizer) if tokenizer else None,
        chat_template=flags.chat_template,
        chat_template_kwargs=read_variables(flags.default_chat_template_kwargs),
    )


def _tokenizer(flags: ModelFlags) -> str:
    """The path of the tokenizer that takes the place of the model's own; '' for none. Raises ConfigError."""
    if flags.tokenizer is None:
        return ""
    found = find_tokenizer(flags.tokenizer, offline=flags.offline, download_dir=flags.download_dir)
    return str(found.absolute())


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
    from pegainfer.app.text import TextSide, load_text, make_template

    if target.model is not None:
        return load_text(target.model, target.text)
    from pegainfer.frontend.byte_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    return TextSide(tokenizer, make_template(tokenizer, target.text))

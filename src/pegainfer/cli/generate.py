"""pegainfer generate: one answer, streamed to the terminal, by an engine in this process."""

from __future__ import annotations

import dataclasses
import datetime
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from pegainfer.app.config import EngineConfig
from pegainfer.cli.answer import request_for, running, show, stream
from pegainfer.cli.flags import Given
from pegainfer.cli.target import ModelFlags, choose, load_text_side
from pegainfer.contract.errors import ConfigError, RequestError
from pegainfer.engine.config import SchedulerConfig

if TYPE_CHECKING:
    from pegainfer.app.text import TextSide

ONE_SEQUENCE = 1  # slots: the command answers one prompt


@dataclass(frozen=True, kw_only=True)
class GenerateFlags:
    """What is asked of the model, and how the answer is drawn."""

    raw: bool = field(
        default=False, metadata={"help": "Complete the prompt as it stands, without the chat template."}
    )
    system: str | None = field(default=None, metadata={"help": "System message of the chat.", "empty": True})
    max_tokens: int = field(default=256, metadata={"help": "Longest answer in tokens."})
    temperature: float = field(default=0.0, metadata={"help": "0 always takes the likeliest token."})
    top_k: int = field(default=0, metadata={"help": "Draw among the k likeliest tokens; 0 or -1: all."})
    top_p: float = field(
        default=1.0, metadata={"help": "Draw among the likeliest tokens that reach this mass."}
    )
    stop: tuple[str, ...] = field(
        default=(), metadata={"help": "Text that ends the answer; may be repeated."}
    )
    ignore_eos: bool = field(default=False, metadata={"help": "Go on after the model's end-of-text token."})

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError("max_tokens", expected="≥ 1", got=self.max_tokens, where="--max-tokens")


def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads it from standard input.")],
    *,
    ask: GenerateFlags,
    flags: ModelFlags,
    engine: EngineConfig,
    scheduler: SchedulerConfig,
    given: Given,
) -> int:
    """Answer one prompt in the terminal. Text goes to stdout; the speed goes to stderr.

    The prompt is a message of a chat if the model has a chat template, else text to be continued.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    scheduler = dataclasses.replace(scheduler, max_slots=scheduler.max_slots or ONE_SEQUENCE)
    target = choose(None, flags, engine, scheduler, given)
    side = load_text_side(target)
    ids = _prompt_ids(text, ask, side)
    request = request_for(
        "generate", ids, side.tokenizer, ask, scheduler.seed, ask.max_tokens, ignore_eos=ask.ignore_eos
    )
    with running(target) as (engine_here, _):
        answer = stream(engine_here, request, side.tokenizer, ask.stop, show)
    print(flush=True)
    print(answer.speed(len(ids)), file=sys.stderr)
    return 0


def _prompt_ids(text: str, ask: GenerateFlags, side: TextSide) -> list[int]:
    """Raises RequestError where there is nothing to continue."""
    if ask.raw or side.template is None:
        if ask.system is not None:
            raise RequestError(
                "--system needs a chat", remedy="leave --raw out, or use a model with a template"
            )
        ids = side.tokenizer.encode(text)
    else:
        if not text:
            raise RequestError("the prompt is empty", expected="some text")
        messages = [{"role": "user", "content": text}]
        if ask.system is not None:
            messages.insert(0, {"role": "system", "content": ask.system})
        rendered = side.template.render(messages, now=datetime.datetime.now())
        ids = side.tokenizer.encode(rendered, add_special_tokens=False)
    if not ids:
        raise RequestError("the prompt is empty", expected="some text")
    return ids

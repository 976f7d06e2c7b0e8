"""pegainfer chat: a conversation in the terminal, by an engine in this process.

What was said before stays in the prefix cache, so a turn costs its own tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegainfer.app.config import EngineConfig
from pegainfer.cli.answer import request_for, running, show, stream
from pegainfer.cli.flags import Given
from pegainfer.cli.target import MODEL_HELP, ModelFlags, choose, load_text_side
from pegainfer.contract.errors import ConfigError, EngineDeadError, PegaError, RequestError
from pegainfer.engine.config import SchedulerConfig

if TYPE_CHECKING:
    from pegainfer.app.text import TextSide
    from pegainfer.contract.request import GenerateRequest
    from pegainfer.engine.inprocess import InProcessEngine

HELP = """\
/system TEXT   set the system message; without TEXT, remove it
/reset         begin anew; the system message stays
/undo          take back the last question and its answer
/help          this
/exit          leave; so does Ctrl-D
\"\"\"            begins and ends a message of several lines
Ctrl-C stops an answer; what was said until then stays."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, kw_only=True)
class ChatFlags:
    """How answers are drawn."""

    system: str | None = field(default=None, metadata={"help": "System message.", "empty": True})
    max_tokens: int = field(
        default=0, metadata={"help": "Longest answer in tokens; 0: up to the context's end."}
    )
    temperature: float | None = field(
        default=None, metadata={"help": "0 always takes the likeliest token; default: the model's own."}
    )
    top_k: int | None = field(
        default=None,
        metadata={"help": "Draw among the k likeliest tokens; 0 or -1: all; default: the model's."},
    )
    top_p: float | None = field(
        default=None,
        metadata={"help": "Draw among the likeliest that reach this mass; default: the model's."},
    )

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise ConfigError("max_tokens", expected="≥ 0", got=self.max_tokens, where="--max-tokens")

    def drawn(self, generation: Mapping[str, Any]) -> Drawn:
        """How answers are drawn where the model says this of sampling. Raises ConfigError."""
        from pegainfer.frontend.http.request.generation_config import generation_defaults

        own = generation_defaults(generation)
        return Drawn(
            own.temperature if self.temperature is None else self.temperature,
            own.top_k if self.top_k is None else self.top_k,
            own.top_p if self.top_p is None else self.top_p,
        )


@dataclass(frozen=True)
class Drawn:
    """The values in force."""

    temperature: float
    top_k: int
    top_p: float


def chat(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    *,
    ask: ChatFlags,
    flags: ModelFlags,
    engine: EngineConfig,
    scheduler: SchedulerConfig,
    given: Given,
) -> int:
    """Talk to a model in the terminal; /help lists what can be typed.

    Where standard input is no terminal, each line is a message and answers alone go to standard output.
    """
    scheduler = dataclasses.replace(scheduler, max_slots=scheduler.max_slots or 1)
    target = choose(model, flags, engine, scheduler, given)
    side = load_text_side(target)
    if side.template is None:
        raise ConfigError(
            "the model has no chat template", got=target.spec.name, remedy="use `pegainfer generate --raw`"
        )
    terminal = sys.stdin.isatty()
    with running(target) as (engine_here, info):
        if terminal:
            drawn = ask.drawn(side.generation)
            print(
                f"{target.spec.name} on {info.device}, temperature {drawn.temperature:g}, "
                f"top_p {drawn.top_p:g}. /help lists commands.",
                file=sys.stderr,
            )
        Conversation(engine_here, side, ask, scheduler.seed, info.max_model_len).talk(terminal)
    return 0


class Conversation:
    """Messages so far, and the loop that adds to them."""

    def __init__(
        self, engine: InProcessEngine, side: TextSide, ask: ChatFlags, seed: int | None, max_model_len: int
    ) -> None:
        self._engine = engine
        self._side = side
        self._ask = ask
        self._drawn = ask.drawn(side.generation)
        self._seed = seed
        self._max_model_len = max_model_len
        self._system = ask.system
        self._turns: list[dict[str, str]] = []
        self._numbers = itertools.count(1)

    def talk(self, terminal: bool) -> None:
        """Until the input ends or /exit."""
        for text in _messages(terminal):
            if text.startswith("/"):
                if not self._obey(text):
                    return
            elif text.strip():
                try:
                    self._answer(text, terminal)
                except KeyboardInterrupt:  # before the answer began, or twice
                    if not terminal:
                        raise
                    del self._turns[-1:]
                    print(file=sys.stderr)

    def _obey(self, text: str) -> bool:
        """One command. Returns whether the conversation goes on."""
        command, _, rest = text.partition(" ")
        if command in ("/exit", "/quit", "/bye"):
            return False
        if command == "/system":
            self._system = rest.strip() or None
        elif command == "/reset":
            self._turns.clear()
        elif command == "/undo":
            del self._turns[-2:]
        elif command == "/help":
            print(HELP, file=sys.stderr)
        else:
            print(f"no such command: {command[:40]!r}; /help lists them", file=sys.stderr)
        return True

    def _answer(self, text: str, terminal: bool) -> None:
        """One turn. A message that cannot be answered is told and forgotten."""
        self._turns.append({"role": "user", "content": text})
        try:
            request, prompt = self._request()
            answer = stream(self._engine, request, self._side.tokenizer, (), show, interruptible=True)
        except EngineDeadError:
            raise  # nothing more can be asked
        except PegaError as e:
            self._turns.pop()
            print(f"pegainfer: {e}; /reset begins anew", file=sys.stderr)
            return
        print(flush=True)
        if terminal:
            stopped = " stopped" if answer.interrupted else ""
            print(f"{DIM}{answer.speed(prompt)}{stopped}{PLAIN}", file=sys.stderr)
        self._turns.append({"role": "assistant", "content": answer.text})

    def _request(self) -> tuple[GenerateRequest, int]:
        """What is asked next, and its prompt's length in tokens. Raises RequestError where it is too long."""
        template, tokenizer = self._side.template, self._side.tokenizer
        assert template is not None
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        text = template.render([*system, *self._turns], now=datetime.datetime.now())
        ids = tokenizer.encode(text, add_special_tokens=False)
        room = self._max_model_len - len(ids)
        if room < 1:
            raise RequestError(
                "the conversation is longer than the context", expected=f"< {self._max_model_len} tokens",
                got=len(ids),
            )  # fmt: skip
        number = next(self._numbers)
        seed = None if self._seed is None else self._seed + number
        longest = min(self._ask.max_tokens or room, room)
        request = request_for(f"chat-{number}", ids, tokenizer, self._drawn, seed, longest)
        return request, len(ids)


def _messages(terminal: bool) -> Iterator[str]:
    """What the user types, message by message, until the input ends."""
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives `input` editing and a history)
    while True:
        try:
            text = _line("> " if terminal else "")
            if text.startswith('"""'):
                text = _block(text[3:], terminal)
        except EOFError:
            if terminal:
                print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            if not terminal:
                raise
            print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)
            continue
        yield text


def _block(first: str, terminal: bool) -> str:
    """The lines up to one that ends with three quotes, which may be the first."""
    lines = [first]
    while not lines[-1].rstrip().endswith('"""'):
        lines.append(_line(". " if terminal else ""))
    lines[-1] = lines[-1].rstrip().removesuffix('"""')
    return "\n".join(lines).strip("\n")


def _line(prompt: str) -> str:
    """Raises EOFError at the input's end."""
    if prompt:
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")

"""A worker process: `python -m pegainfer.frontend.worker`; jobs on standard input, results on its output.

It does what a hostile request could make endless, so that it can be killed: grammars are compiled and large
chats are rendered here. Each job and each result is a frame (contract/frames.py) of msgpack.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import resource
import signal
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from pegainfer.contract.errors import PegaError, RequestError
from pegainfer.contract.frames import frame_of, read_frame
from pegainfer.frontend.grammar.compiler import GrammarJob, compile_grammar
from pegainfer.frontend.grammar.vocabulary import Vocabulary, ll_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from pegainfer.frontend.chat_template import ChatTemplate

MEMORY_BYTES = 4 << 30  # of address space; a job that needs more ends its worker
NICENESS = 5  # below the server and the engine
# A grammar nested so deeply that it overflows this stack ends its worker, and never reaches the engine, whose
# stacks are larger.
STACK_BYTES = 1 << 20


class TemplateJob(msgspec.Struct, frozen=True, tag="template"):
    """A chat to render with the model's template, or with one of its own."""

    variables: dict[str, object]
    now: datetime.datetime  # what the template's strftime_now formats
    source: str | None = None


class WarmJob(msgspec.Struct, frozen=True, tag="warm"):
    """Makes what grammars need, so that no grammar's time is spent on it."""


class Setup(msgspec.Struct, frozen=True):
    """The first frame: what the jobs are about."""

    vocabulary: Vocabulary
    template: str | None
    special_tokens: dict[str, str]
    tool_template: str | None = None  # takes the template's place where there are tools


class Outcome(msgspec.Struct, frozen=True):
    """The answer to a job: a text, or why there is none."""

    text: str = ""
    error: str | None = None
    param: str | None = None


Job = GrammarJob | TemplateJob | WarmJob


class _Worker:
    """Makes its tokenizer and template when a job first needs them."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._tokenizer: LLTokenizer | None = None
        self._template: ChatTemplate | None = None

    def run(self, job: Job) -> Outcome:
        try:
            if isinstance(job, GrammarJob | WarmJob):
                return Outcome(self._grammar(job))
            return Outcome(self._render(job))
        except RequestError as error:
            return Outcome(error=str(error), param=error.param)
        except PegaError as error:
            return Outcome(error=str(error))
        except BaseException as error:  # a Rust panic is no Exception
            return Outcome(error=f"it failed: {type(error).__name__}")

    def _grammar(self, job: GrammarJob | WarmJob) -> str:
        if self._tokenizer is None:
            self._tokenizer = ll_tokenizer(self._setup.vocabulary)
        if isinstance(job, WarmJob):
            return ""
        tokenizer = self._tokenizer
        results: list[str | BaseException] = []

        def work() -> None:
            try:
                results.append(compile_grammar(job, tokenizer))
            except BaseException as error:
                results.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if isinstance(results[0], BaseException):
            raise results[0]
        return str(results[0])

    def _render(self, job: TemplateJob) -> str:
        from pegainfer.frontend.chat_template import ChatTemplate

        if job.source is not None:
            template = ChatTemplate(job.source, self._setup.special_tokens)
            return template.render_variables(job.variables, job.now)
        if self._template is None:
            assert self._setup.template is not None
            setup = self._setup
            self._template = ChatTemplate(
                self._setup.template, setup.special_tokens, tool_source=setup.tool_template
            )
        return self._template.render_variables(job.variables, job.now)


def main() -> None:
    """Serves until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's affair, which closes standard input
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not end up among the results
    read = sys.stdin.buffer.read
    with contextlib.suppress(EOFError):
        worker = _Worker(msgspec.msgpack.decode(read_frame(read), type=Setup))
        decoder = msgspec.msgpack.Decoder(Job)
        encoder = msgspec.msgpack.Encoder()
        out.write(frame_of(b"ready"))
        out.flush()
        while True:
            outcome = worker.run(decoder.decode(read_frame(read)))
            out.write(frame_of(encoder.encode(outcome)))
            out.flush()


if __name__ == "__main__":
    main()

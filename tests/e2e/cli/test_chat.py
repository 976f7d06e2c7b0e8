"""pegainfer chat as a process: a script of messages through a pipe, and a user at a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time

CHAT = [sys.executable, "-m", "pegainfer.cli.main", "chat"]
PATIENCE = 60.0  # seconds: the longest that any answer takes on a loaded machine


def through_a_pipe(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CHAT, *flags], input=script, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def test_a_conversation() -> None:
    script = "What is the capital of France?\nAnd of Italy?\n"
    done = through_a_pipe(script, "--temperature", "0", "--activation-dtype", "f32")
    assert done.returncode == 0 and done.stderr == ""
    first, second = done.stdout.splitlines()
    assert "Paris" in first and "Rome" in second


def test_a_turn_sees_what_was_said_and_what_was_taken_back_is_forgotten() -> None:
    """The null device continues a prompt by arithmetic, so equal answers mean equal prompts."""
    fixed = ("--device", "null", "--max-tokens", "12", "--temperature", "0")
    plain = through_a_pipe("one\ntwo\n", *fixed).stdout.splitlines()
    undone = through_a_pipe("one\nthree\n/undo\ntwo\n", *fixed).stdout.splitlines()
    reset = through_a_pipe("one\n/reset\ntwo\n", *fixed).stdout.splitlines()
    alone = through_a_pipe("two\n", *fixed).stdout.splitlines()
    system = through_a_pipe("/system Be brief.\none\n/system\n/undo\none\n", *fixed).stdout.splitlines()
    block = through_a_pipe('"""\none\n"""\n', *fixed).stdout.splitlines()
    assert [undone[0], undone[2]] == plain
    assert reset == [plain[0], *alone] and alone[0] != plain[1]
    assert system[0] != plain[0] and system[1] == plain[0]
    assert block == [plain[0]]


def test_what_cannot_be_answered_is_told_and_the_talk_goes_on() -> None:
    flags = ("--device", "null", "--max-model-len", "64", "--max-tokens", "4", "--temperature", "0")
    done = through_a_pipe(f"{'x' * 200}\n/nonsense\nseven\n/exit\nnever\n", *flags)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1
    told = done.stderr.splitlines()
    assert "longer than the context; expected < 64 tokens" in told[0] and "/reset" in told[0]
    assert told[1].startswith("no such command: '/nonsense'") and len(told) == 2


class Terminal:
    """A user before a terminal."""

    def __init__(self, *flags: str) -> None:
        pid, self._fd = pty.fork()
        if pid == 0:
            os.execvpe(CHAT[0], [*CHAT, *flags], {**os.environ, "TERM": "dumb"})
        self._pid = pid
        self.seen = ""
        self._read = 0

    def wait_for(self, text: str) -> None:
        """Reads on from where the last call ended, to the end of `text`."""
        end = time.monotonic() + PATIENCE
        while text not in self.seen[self._read :]:
            assert select.select([self._fd], [], [], end - time.monotonic())[0], self.seen
            self.seen += os.read(self._fd, 65536).decode(errors="replace")
        self._read = self.seen.index(text, self._read) + len(text)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def exit_code(self) -> int:
        try:
            while os.read(self._fd, 65536):
                pass
        except OSError:  # the other side has closed
            pass
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    user = Terminal("--temperature", "0")
    user.wait_for("> ")
    user.type("Write a very long story about a river.\n")
    user.wait_for("\n")  # the echo
    user.wait_for(" ")  # the answer has begun
    user.type("\x03")
    user.wait_for("stopped")
    user.wait_for("> ")
    user.type("What is the capital of France?\n")
    user.wait_for("tokens/s]")
    user.wait_for("> ")  # from here on the terminal hands every key to the program
    user.type("\x04")
    assert user.exit_code() == 0

"""One continuation on its way from token ids to text: detokenised, stopped, its logprobs kept in step.

Two positions in the decoded text drive it: what is decoded and what has been shown. Text between them is
held back because it may become a stop string or half a character. A token's logprob goes out with the last
piece of its text, so that logprobs and text of the chunks always add up to the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from pegainfer.contract.event import FinishReason, TokenEvent, TokenLogprob
from pegainfer.frontend.detokenize import Detokenizer, StopStrings
from pegainfer.frontend.http.errors import ApiError, event_error


class Entry(msgspec.Struct):
    """A generated token with its logprob; [start, end) is its text's place in the continuation."""

    logprob: TokenLogprob
    start: int
    end: int | None = None  # None while its text is not known yet


class Delta(msgspec.Struct):
    """What one event adds to one choice."""

    choice: int
    text: str = ""
    tokens: list[int] = msgspec.field(default_factory=list)
    entries: list[Entry] = msgspec.field(default_factory=list)
    finish: str | None = None
    stop_reason: int | str | None = None  # the user's stop token or string, where that ended it
    error: ApiError | None = None

    @property
    def empty(self) -> bool:
        return not self.text and not self.entries and self.finish is None


class Choice:
    """State of one continuation."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: StopStrings | None,
        *,
        min_tokens: int = 0,
        user_stops: Mapping[int, int | str] = MappingProxyType({}),
        show_stop: bool = False,
        all_logprobs: bool = False,
    ) -> None:
        """
        Args:
            min_tokens: stop strings are not looked for in the text of so many first tokens.
            user_stops: stop ids of the request with what is told as the reason; the model's own EOS is none.
            show_stop: the text includes the stop string or stop token.
            all_logprobs: logprobs of tokens that end the text are given even though theirs is not shown.
        """
        self.index = index
        self.num_tokens = 0  # counted in usage: up to the one that ended it
        self.finish: str | None = None
        self.last_time = 0.0  # CLOCK_MONOTONIC seconds of the last delivery
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._user_stops = user_stops
        self._show_stop = show_stop
        self._all_logprobs = all_logprobs
        self._decoded = 0  # characters
        self._shown = 0
        self._held: list[Entry] = []  # entries whose text is not wholly shown, in order

    def feed(self, event: TokenEvent) -> Delta:
        """Takes one event of this continuation. After `finish` is set, call it no more."""
        delta = Delta(self.index)
        tokens = event.tokens
        for i, token in enumerate(tokens):
            self.num_tokens += 1
            delta.tokens.append(token)
            logprob = event.logprobs[i] if event.logprobs else None
            ends = event.finish is FinishReason.STOP and token == event.stop_token and i == len(tokens) - 1
            if ends and not self._show_stop:
                if logprob is not None and self._all_logprobs:
                    self._held.append(Entry(logprob, self._decoded, self._decoded))
            elif self._token(token, logprob, delta):
                return delta  # later tokens were generated beyond the stop string
        if event.finish is not None:
            self._end(event, delta)
        return delta

    def _token(self, token: int, logprob: TokenLogprob | None, delta: Delta) -> bool:
        """Whether a stop string is complete with this token."""
        text = self._detokenizer.push(token)
        if logprob is not None:
            self._held.append(Entry(logprob, self._decoded))
        if not text:
            return False
        return self._text(text, delta)

    def _text(self, text: str, delta: Delta) -> bool:
        self._decoded += len(text)
        for entry in reversed(self._held):
            if entry.end is not None:
                break
            entry.end = self._decoded
        if self._stops is None or self.num_tokens <= self._min_tokens:
            self._show(text, delta)
            return False
        safe, matched = self._stops.push(text)
        self._show(safe, delta)
        if matched is None:
            return False
        if self._show_stop:
            self._show(matched, delta)
        delta.finish = self.finish = FinishReason.STOP.value
        delta.stop_reason = matched
        # Tokens that lie wholly in what is cut away have no text, hence no logprobs if these go by the text.
        for entry in self._held:
            if entry.start < self._shown or self._all_logprobs:
                entry.start = min(entry.start, self._shown)
                delta.entries.append(entry)
        self._held.clear()
        return True

    def _show(self, text: str, delta: Delta) -> None:
        delta.text += text
        self._shown += len(text)
        released = 0
        for entry in self._held:
            if entry.end is None or entry.end > self._shown:
                break
            released += 1
        if released:
            delta.entries += self._held[:released]
            del self._held[:released]

    def _end(self, event: TokenEvent, delta: Delta) -> None:
        """Shows what is held; half a character in the detokenizer is dropped."""
        assert event.finish is not None
        if self._stops is not None:
            self._show(self._stops.flush(), delta)
        delta.entries += self._held
        self._held.clear()
        delta.finish = self.finish = event.finish.value
        if event.finish is FinishReason.ERROR:
            delta.error = event_error(event)
        elif event.stop_token is not None:
            delta.stop_reason = self._user_stops.get(event.stop_token)

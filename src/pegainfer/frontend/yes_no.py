"""Scores by a yes-or-no question, as Qwen3-Reranker was trained to answer it.

The score of a query and a document is the probability of "yes" against "no" as the answer's first token:
https://huggingface.co/Qwen/Qwen3-Reranker-0.6B.
"""

from __future__ import annotations

import datetime
import math

from pegainfer.contract.errors import UnsupportedError
from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.tokenizer import Tokenizer

# The model was trained with exactly these words.
QUESTION = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Asked for beside the drawn token's: both labels are among them on a model that was trained to judge.
MOST_LOGPROBS = 20
_QWEN3_MARKERS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
_PLACE = "\ue000"  # a private character, which stands for the pair while the chat template is rendered


class YesNo:
    """Makes prompts that end where the model says yes or no."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        """Raises UnsupportedError where the model cannot be asked."""
        labels = [tokenizer.token_id(word) for word in ("yes", "no")]
        if None in labels:
            raise UnsupportedError(
                "this model cannot be asked for yes or no", expected="a token for each of yes and no",
                got="a vocabulary without them",
            )  # fmt: skip
        self.labels: tuple[int, int] = (labels[0], labels[1])  # type: ignore[assignment]
        before, after = _frame(tokenizer, template)
        self._tokenizer = tokenizer
        self.before = tokenizer.encode(before, add_special_tokens=False)
        self.after = tokenizer.encode(after, add_special_tokens=False)

    def text(self, query: str, document: str, instruction: str | None) -> str:
        """What is judged, between `before` and `after`."""
        return f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"

    def encode(self, text: str) -> list[int]:
        """Its ids; what spells a special token is plain text, so that a document cannot end its turn."""
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)

    def prompt(self, ids: list[int]) -> list[int]:
        """The whole prompt around the ids of `text`."""
        return [*self.before, *ids, *self.after]


def _frame(tokenizer: Tokenizer, template: ChatTemplate | None) -> tuple[str, str]:
    """The prompt before and after the pair: Qwen3's chat without thoughts, else by the chat template."""
    if all(tokenizer.token_id(marker) is not None for marker in _QWEN3_MARKERS):
        before = f"<|im_start|>system\n{QUESTION}<|im_end|>\n<|im_start|>user\n"
        return before, "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    if template is None:
        raise UnsupportedError(
            "this model cannot be asked for yes or no", expected="a chat template", got="none",
            remedy="set the option chat_template",
        )  # fmt: skip
    turns = [{"role": "system", "content": QUESTION}, {"role": "user", "content": _PLACE}]
    text = template.render(turns, now=datetime.datetime.now(), variables={"enable_thinking": False})
    before, place, after = text.partition(_PLACE)
    if not place:
        raise UnsupportedError(
            "this model cannot be asked for yes or no", expected="a chat template that shows the user's turn",
            got="one that does not",
        )  # fmt: skip
    return before, after


def probability(yes: float, no: float) -> float:
    """Of yes against no, from their logits or log-probabilities."""
    difference = yes - no
    if difference >= 0:
        return 1.0 / (1.0 + math.exp(-difference))
    odds = math.exp(difference)
    return odds / (1.0 + odds)


def cosine(first: list[float], second: list[float]) -> float:
    """Of the angle between two vectors; 0 where one has no length."""
    lengths = math.hypot(*first) * math.hypot(*second)
    return math.fsum(a * b for a, b in zip(first, second, strict=True)) / lengths if lengths else 0.0

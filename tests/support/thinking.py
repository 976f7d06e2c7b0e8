"""A tokenizer and templates of models that think, as Qwen's: the markers are tokens, and not special ones."""

from __future__ import annotations

from pegainfer.frontend.byte_tokenizer import byte_tokenizer
from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.tokenizer import Tokenizer

START, END = 258, 259  # ids of <think> and </think>
VOCAB_SIZE = 260


def thinking_tokenizer() -> Tokenizer:
    """Bytes, <|im_start|>, <|im_end|>, <think> and </think>."""
    return byte_tokenizer(("<think>", "</think>"))


# The template writes <think>, unless it is told not to think. The comment makes the tools' style Hermes'.
OPENS = ChatTemplate(
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{{ tools | tojson }}{# <tool_call> #}"
    "{% if add_generation_prompt %}<think>{% if enable_thinking is false %}</think>{% endif %}{% endif %}"
)
# The model writes <think> itself.
LEAVES = ChatTemplate(
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{{ tools | tojson }}{# <tool_call> #}"
    "{% if add_generation_prompt and enable_thinking is false %}<think></think>{% endif %}"
)

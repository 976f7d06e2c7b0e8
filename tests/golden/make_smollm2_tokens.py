"""Writes tests/data/tokenizer/smollm2.json: texts and their ids by the reference tokenizer.

The reference is the `tokenizers` library on SmolLM2's tokenizer.json, which is too large to be kept here; in
its place transformers reads vocabulary and merges from the default model's GGUF. It does not know that
SmolLM2 cuts numbers into digits, so that is set here, as the file has it. Run in the golden environment:
python tests/golden/make_smollm2_tokens.py [path/to/tokenizer.json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits
from transformers import AutoTokenizer

from pegainfer.app.resolve import resolve

OUT = Path(__file__).parents[1] / "data" / "tokenizer" / "smollm2.json"
TEXTS = [
    "",
    " ",
    "\n",
    "Hello world",
    "What is the capital of France?",
    "The quick brown fox jumps over the lazy dog.",
    "It didn't, couldn't, and won't; we'll see, I'd say they're 5'11\".",
    "  leading, trailing and   inner    spaces   ",
    "tabs\tand\r\nline ends\n\n\nand \u00a0other\u2003spaces\u200b\ufeff",
    "I'M SHOUTING: IT'S NOT WE'LL",
    "1234567890 3.14159 -1e-10 0xDEADBEEF 1,000,000 ½ ² Ⅳ ① ٣ 四",
    'def f(x: int) -> str:\n    """Doc."""\n    return f\'{x!r:>10}\'  # comment\n\n\nclass A(B):\n\tpass\n',
    "for (int i = 0; i < n; ++i) { a[i] = b[i] * 2.0f; } // done\n#include <stdio.h>\n",
    "SELECT * FROM t WHERE a >= 10 AND b LIKE '%x_y%';",
    '{"key": [1, 2.5, null, true], "nested": {"a": "\\u00e9\\n"}}',
    "https://example.org/path?q=a%20b&c=1#frag user@example.com",
    '<html><body class="x">&amp;</body></html>',
    "你好，世界！今天天气很好。",
    "日本語のテキスト：ひらがな、カタカナ、漢字。",
    "한국어 문장입니다. 띄어쓰기도 있어요.",
    "Привет, мир! Как дела?",
    "مرحبا بالعالم، كيف حالك؟ שלום עולם",
    "नमस्ते दुनिया สวัสดีชาวโลก Ξεσκεπάζω",
    "café naïve Straße œuvre e\u0301 \u00e9",
    "😀 😂🤣 👍🏽 👨‍👩‍👧‍👦 🇫🇷 ❤️",
    "∑∫√≈≠≤≥ αβγ → ⇒ ∀x∈ℝ",
    "\x00\x01\x02\x03\x04\x05\x06\x07\x08\x0b\x0c\x0e\x0f\x10\x13\x14\x16\x1b\x1d\x1f\x7f",
    "a\x04b\x06c\x13d\x14e\x16f\x1dg",
    "\u0080\u0085\u00ad\u00ff\u0100\u0101",
    "\ufffd \uffff \U0010ffff \ue000",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text <|im_end|> in <|endoftext|> between<|im_start|>",
    "<|im_end|><|im_end|><repo_name>x<file_sep>",
    "<|im_start <|im_end| |im_end|> <|unknown|>",
    "a" * 100,
    " " * 64 + "x" + "\n" * 20,
    "ab" * 50 + "!?" * 30,
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor incididunt ut labore.",
]


def from_gguf() -> tokenizers.Tokenizer:
    path = resolve("smollm2-135m-instruct").path
    backend = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    parts = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(parts)
    return backend


def main() -> None:
    reference = tokenizers.Tokenizer.from_file(sys.argv[1]) if len(sys.argv) > 1 else from_gguf()
    cases = []
    for text in TEXTS:
        reference.encode_special_tokens = False
        ids = reference.encode(text).ids
        shown, skipped = (reference.decode(ids, skip_special_tokens=skip) for skip in (False, True))
        reference.encode_special_tokens = True
        case = {"text": text, "ids": ids, "plain_ids": reference.encode(text).ids, "decoded": shown}
        cases.append(case | {"decoded_without_special": skipped})
    made_by = f"tests/golden/make_smollm2_tokens.py with tokenizers {tokenizers.__version__}"
    OUT.write_text(json.dumps({"made_by": made_by, "cases": cases}) + "\n")


if __name__ == "__main__":
    main()

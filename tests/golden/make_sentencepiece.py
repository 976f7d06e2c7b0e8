"""Writes tests/data/tokenizer/sentencepiece.json: a small vocabulary and what SentencePiece makes of texts.

Run where sentencepiece is installed (pip install sentencepiece): python tests/golden/make_sentencepiece.py
"""

from __future__ import annotations

import importlib.metadata
import io
import json
from pathlib import Path

import sentencepiece

OUT = Path(__file__).parents[1] / "data" / "tokenizer" / "sentencepiece.json"
VOCAB_SIZE = 480
CORPUS = (
    """The quick brown fox jumps over the lazy dog while the other dogs sleep in the shade of the house.
When the rain began, the children ran home and their mother made hot tea with honey and lemon.
def add(first, second): return first + second  # a function that adds two numbers
for index in range(10): print(index, index * index)
Les enfants sont allés à l'école, et le maître leur a raconté une histoire très étonnante.
Die Straße führt über die Brücke, wo man früher die Schiffe gezählt hat.
In 1984 there were 365 days and 12 months, as in 2023; in 2024 there were 366 days.
Она читала книгу, пока дети играли в саду, и потом все пили чай.
"""
    * 4
)
TEXTS = [
    "",
    " ",
    "a",
    "the dog",
    " the dog",
    "  the   dogs\n\nsleep  ",
    "The quick brown fox jumped over 1,234 lazy dogs.",
    "def sub(a, b):\n    return a - b\n\tpass",
    "allés à l'école — étonnant!",
    "Она читала книгу",
    "漢字とひらがな",
    "smile 😀👍🏽 now",
    "<s>not special</s> <0x41> <unk>",
    "▁ is the mark",
    "\x00\x01\x7f\r\n\u200b\u3000",
    "aaaaaaaaaaaaaaaaaaaa",
    "theththethethe",
]


def main() -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines()),
        model_writer=model,
        vocab_size=VOCAB_SIZE,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        split_digits=True,
        num_threads=1,
        minloglevel=1,
    )
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(sp.vocab_size())
    types = [2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1 for i in ids]
    version = importlib.metadata.version("sentencepiece")
    content = {
        "made_by": f"tests/golden/make_sentencepiece.py with sentencepiece {version}",
        "tokens": [sp.id_to_piece(i) for i in ids],
        "scores": [sp.get_score(i) for i in ids],
        "types": types,
        "bos_id": sp.bos_id(),
        "eos_id": sp.eos_id(),
        "cases": [{"text": t, "ids": sp.encode(t), "decoded": sp.decode(sp.encode(t))} for t in TEXTS],
    }
    OUT.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()

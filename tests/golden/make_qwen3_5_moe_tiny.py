"""Writes tests/data/qwen3_5/moe.npz: log-probabilities of seeded tiny MoE models by transformers in float32.

Models come from tests/support/tinyqwen3_5moe.py; quantised ones are given to transformers with the values
that their file holds. Run in the golden environment: python tests/golden/make_qwen3_5_moe_tiny.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import transformers
from transformers import Qwen3_5MoeForCausalLM

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.golden.teacher import reference, write  # noqa: E402
from tests.support.tinyqwen3_5 import file_values  # noqa: E402
from tests.support.tinyqwen3_5moe import GGUF_MODELS, MODELS  # noqa: E402

OUT = ROOT / "tests" / "data" / "qwen3_5" / "moe.npz"


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    found = {name: reference(Qwen3_5MoeForCausalLM, model) for name, model in MODELS.items()}
    for name, (model, formats, _) in GGUF_MODELS.items():
        found[name] = reference(Qwen3_5MoeForCausalLM, model, file_values(model, formats))
    write(OUT, "make_qwen3_5_moe_tiny.py", found)


if __name__ == "__main__":
    main()

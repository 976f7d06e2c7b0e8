"""Writes tests/data/lora/tiny.npz: log-probabilities of tiny models with LoRA adapters, by PEFT in float32.

Models and adapters come from tests/support/tinylora.py. Run in the golden environment:
python tests/golden/make_lora_tiny.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.golden.teacher import logprobs_and_greedy, write  # noqa: E402
from tests.support.tinylora import ADAPTERS, BASES, TinyAdapter, write_adapter  # noqa: E402
from tests.support.tinymodel import Tiny, token_ids, write_checkpoint  # noqa: E402

OUT = ROOT / "tests" / "data" / "lora" / "tiny.npz"


def reference(base: Tiny, adapter: TinyAdapter) -> dict[str, Any]:
    """See teacher.reference; the adapter's factors are not merged into the base's weights."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(base, Path(folder) / "base")
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        path = write_adapter(adapter, base, Path(folder) / "adapter")
        adapted = peft.PeftModel.from_pretrained(model, path).eval()
    return logprobs_and_greedy(adapted, token_ids(base))


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    found = {
        f"{b}.{a}": reference(base, adapter) for b, base in BASES.items() for a, adapter in ADAPTERS.items()
    }
    write(OUT, "make_lora_tiny.py", found)


if __name__ == "__main__":
    main()

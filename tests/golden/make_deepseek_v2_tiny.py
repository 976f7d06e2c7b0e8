"""Writes tests/data/deepseek_v2/tiny.npz: log-probabilities of seeded tiny models by transformers in float32.

Models come from tests/support/tinydeepseek.py and deepseekgguf.py; quantised ones are given to transformers
with the values that their file holds. Run in the golden environment:
python tests/golden/make_deepseek_v2_tiny.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import transformers
from transformers import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.golden.teacher import reference, write  # noqa: E402
from tests.support.deepseekgguf import GGUF_MODELS, file_values  # noqa: E402
from tests.support.tinydeepseek import MODELS, TinyDeepseek  # noqa: E402

OUT = ROOT / "tests" / "data" / "deepseek_v2" / "tiny.npz"
CLASSES = {"deepseek_v2": DeepseekV2ForCausalLM, "deepseek_v3": DeepseekV3ForCausalLM}


def class_of(model: TinyDeepseek) -> type:
    return CLASSES[model.text_config()["model_type"]]


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    found = {name: reference(class_of(model), model) for name, model in MODELS.items()}
    for name, (model, formats, split) in GGUF_MODELS.items():
        found[name] = reference(class_of(model), model, file_values(model, formats, split=split))
    write(OUT, "make_deepseek_v2_tiny.py", found)


if __name__ == "__main__":
    main()

"""The vocabularies of real models."""

from __future__ import annotations

import pytest

from pegainfer.app.resolve import ModelRef
from pegainfer.app.text import load_text
from pegainfer.frontend.tokenizer import Tokenizer
from pegainfer.frontend.tokenizer_files import load_tokenizer
from tests.support.default_model import default_model
from tests.support.qwentext import real_json, write_text


@pytest.fixture(scope="module", params=["smollm2", "qwen"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "smollm2":
        return load_text(ModelRef("gguf", default_model(), "m")).tokenizer
    return load_tokenizer(write_text(tmp_path_factory.mktemp("qwen"), real_json()))

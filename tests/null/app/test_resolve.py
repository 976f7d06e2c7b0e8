"""Model references: what is found, and what is said where nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegainfer.app import resolve
from pegainfer.app.cache import DEFAULT_MODEL
from pegainfer.app.resolve import ModelRef
from pegainfer.app.text import load_text
from pegainfer.contract.errors import ConfigError
from pegainfer.runtime.user_cache import CACHE_VARIABLE
from tests.support.smalltokenizers import bpe_json


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


def model_folder(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_text("{}")
    return path


def test_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "My-Model.Q8_0.gguf"
    file.write_bytes(b"GGUF")
    assert resolve.resolve(str(file)) == ModelRef("gguf", file, "My-Model.Q8_0")
    known = tmp_path / DEFAULT_MODEL.file_name
    known.write_bytes(b"GGUF")
    assert resolve.resolve(str(known)).name == "SmolLM2-135M-Instruct"


@pytest.mark.parametrize("vocabulary", ["tokenizer.json", "tiktoken.model"])
def test_a_folder(vocabulary: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "config.json", vocabulary, "model-00001.safetensors")
    assert resolve.resolve(str(folder)) == ModelRef("folder", folder, "m")


def test_a_home_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert resolve.resolve("~/x.gguf").path == tmp_path / "x.gguf"


def test_the_default_model_is_pulled_only_when_asked(monkeypatch: pytest.MonkeyPatch, no_cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"smollm2-135m-instruct is not in the cache.*run `pegainfer pull`"):
        resolve.resolve("SmolLM2-135M-Instruct")
    pulled: list[object] = []
    place = no_cache / "f.gguf"
    monkeypatch.setattr("pegainfer.app.pull.pull", lambda **options: pulled.append(options) or place)
    assert resolve.resolve("SMOLLM2-135m-instruct", fetch=True) == ModelRef(
        "gguf", place, "SmolLM2-135M-Instruct"
    )
    assert pulled == [{"progress": None}]


@pytest.mark.parametrize(
    ("names", "match"),
    [
        ((), "got no config.json, no tokenizer.json, no \\*.safetensors"),
        (("config.json", "model.safetensors"), "got no tokenizer.json; at .*fetch the missing files"),
        (("config.json", "tokenizer.json"), "got no \\*.safetensors"),
        (("b.gguf", "a.gguf"), "remedy: give the file .*/m/a.gguf"),
    ],
)
def test_a_folder_that_is_no_whole_model(tmp_path: Path, names: tuple[str, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        resolve.resolve(str(model_folder(tmp_path / "m", *names)))


@pytest.mark.parametrize(
    ("reference", "match"),
    [
        ("no/such.gguf", "no such model.*check the path"),
        ("./org/name", "check the path"),
        ("gpt-4", "expected SmolLM2-135M-Instruct, a .gguf file, a folder.*owner/model.*got 'gpt-4'"),
        ("", "no such model"),
        ("x" * 5000, "not a model reference.*File name too long"),
        ("a\0b", "no such model|not a model reference"),  # by Python's version
    ],
)
def test_what_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, match: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=match) as e:
        resolve.resolve(reference)
    assert len(str(e.value)) < 700


def test_another_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"not a weights file that can be served.*give the folder"):
        resolve.resolve(str(file))


def test_what_a_model_says_of_sampling_comes_with_its_text_side(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(bpe_json())
    model = ModelRef("folder", tmp_path, "m")
    assert load_text(model).generation == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert load_text(model).generation == {"temperature": 0.6}

"""The models of the caches: listed with their reasons, looked into, and deleted without harm to others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pegainfer.app.library import Cached, cached_models, delete, examine, find_cached, verdict
from pegainfer.app.resolve import resolve
from pegainfer.contract.errors import ConfigError
from pegainfer.runtime.user_cache import CACHE_VARIABLE
from tests.support.fake_hub import FakeHub, serving
from tests.support.modelfiles import gguf_bytes
from tests.support.server import pega_here
from tests.support.tinymodel import (
    GGUF_MODELS,
    Tiny,
    gguf_metadata,
    gguf_tensors,
    write_checkpoint,
    write_gguf,
)

MODEL, FORMS = GGUF_MODELS["gguf_q8_0"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Two repositories, fetched: one of GGUF files, one of safetensors."""
    from huggingface_hub import constants

    checkpoint = write_checkpoint(Tiny("tiny", seed=1), tmp_path / "tiny")
    whole = {p.name: p.read_bytes() for p in checkpoint.iterdir()} | {"tokenizer.json": b"{}"}
    good = write_gguf(MODEL, tmp_path / "good.gguf", FORMS).read_bytes()
    other = gguf_bytes({"general.architecture": "mamba"})
    quants = {"M-Q8_0.gguf": good, "M-Q4_0.gguf": other, "copy/M-F16.gguf": good}
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serving(FakeHub({"o/whole": whole, "o/quants": quants})) as fake:
        monkeypatch.setenv("HF_ENDPOINT", fake.endpoint)
        for reference in ("o/whole", "o/quants:Q8_0", "o/quants:Q4_0"):
            resolve(reference)
        yield fake


def names(models: list[Cached]) -> list[str]:
    return [model.name for model in models]


def test_what_is_cached_and_whether_it_can_be_served(hub: FakeHub) -> None:
    found = {model.name: verdict(model) for model in cached_models()}
    assert list(found) == ["o/quants:Q4_0", "o/quants:Q8_0", "o/whole"]
    assert found["o/quants:Q8_0"] == found["o/whole"] == ""
    assert found["o/quants:Q4_0"].startswith("no model line for this architecture; ")
    sizes = {model.name: model.nbytes for model in cached_models()}
    assert sizes["o/quants:Q8_0"] == len(hub.repositories["o/quants"]["M-Q8_0.gguf"])
    assert sizes["o/whole"] == sum(map(len, hub.repositories["o/whole"].values()))


def test_no_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    assert cached_models(str(tmp_path / "nothing")) == []


def test_facts_are_those_of_the_file(hub: FakeHub) -> None:
    facts = examine(resolve("o/quants:Q8_0", offline=True).path)
    shapes = MODEL.shapes()
    parameters = 0
    for shape in shapes.values():
        count = 1
        for n in shape:
            count *= n
        parameters += count
    assert (facts.architecture, facts.parameters) == ("LlamaForCausalLM", parameters)
    c = MODEL.hf_config()
    head_dim = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    assert facts.kv_bytes == c["num_hidden_layers"] * 2 * c["num_key_value_heads"] * head_dim * 4
    assert facts.context == facts.served_context == c["max_position_embeddings"]
    assert set(facts.formats) == {"q8_0", "f32"}
    matrices = sum(a * b for a, b in (s for s in shapes.values() if len(s) == 2))
    assert facts.formats["q8_0"] == matrices // 32 * 34
    assert facts.memory > facts.weight_bytes


def test_one_file_is_deleted_and_its_neighbours_stay(hub: FakeHub, tmp_path: Path) -> None:
    size = len(hub.repositories["o/quants"]["M-Q8_0.gguf"])
    assert delete(find_cached("o/quants:q8_0")) == size
    assert names(cached_models()) == ["o/quants:Q4_0", "o/whole"]
    hub.fetched.clear()
    resolve("o/quants:Q4_0")
    assert hub.fetched == []  # it is still whole
    delete(find_cached("o/quants"))
    assert names(cached_models()) == ["o/whole"]
    assert not list((tmp_path / "hub").glob("*quants*/blobs/*"))
    delete(find_cached("o/whole"))
    assert not list((tmp_path / "hub").glob("models--*"))


def test_a_model_in_parts_is_one_model(hub: FakeHub, tmp_path: Path) -> None:
    metadata, tensors = gguf_metadata(MODEL), gguf_tensors(MODEL, FORMS)
    parts = [
        gguf_bytes(({} if i else metadata) | {"split.no": i, "split.count": 2}, tensors[i::2]) for i in (0, 1)
    ]
    files = [f"Q8_0/B-Q8_0-{n:05}-of-00002.gguf" for n in (1, 2)]
    hub.repositories["o/split"] = dict(zip(files, parts, strict=True))
    resolve("o/split")
    (model,) = find_cached(f"o/split/{files[1]}")
    assert (model.name, model.nbytes, verdict(model)) == ("o/split:Q8_0", sum(map(len, parts)), "")
    assert examine(model.ref.path) == examine(resolve("o/quants:Q8_0", offline=True).path)
    assert delete([model]) == sum(map(len, parts))
    assert "o/split:Q8_0" not in names(cached_models())
    assert not list((tmp_path / "hub").glob("models--o--split*"))


def test_a_file_that_has_two_names_stays_until_the_last_is_deleted(hub: FakeHub) -> None:
    """Equal files of a repository share their bytes in the hub's cache."""
    resolve("o/quants:F16")
    assert delete(find_cached("o/quants:F16")) == 0
    assert verdict(find_cached("o/quants:Q8_0")[0]) == ""


def test_what_is_not_cached_cannot_be_deleted(hub: FakeHub, tmp_path: Path) -> None:
    for reference in ("o/none", "o/quants:F16", str(tmp_path / "good.gguf"), "quants"):
        with pytest.raises(
            ConfigError, match="no such model in the cache; expected o/quants:Q4_0 o/quants:Q8_0"
        ):
            find_cached(reference)
    assert names(find_cached("o/quants/M-Q8_0.gguf")) == ["o/quants:Q8_0"]


def test_commands(hub: FakeHub) -> None:
    listed = pega_here("list").stdout.splitlines()
    assert listed[0].split() == ["NAME", "SIZE", "FORMAT", "SERVABLE"]
    assert listed[1].startswith("o/quants:Q4_0") and " no: no model line for this architecture" in listed[1]
    assert listed[2].split()[0] == "o/quants:Q8_0" and listed[2].endswith("GGUF Q8_0    yes")
    wrong = pega_here("rm", "o/quants:Q8_0", "o/none")
    assert wrong.returncode == 2 and len(cached_models()) == 3  # a wrong name deletes nothing
    assert pega_here("rm", "o/quants").stdout.startswith("deleted o/quants:Q4_0, o/quants:Q8_0: ")
    assert pega_here("rm", "o/whole").returncode == 0
    assert pega_here("list").stdout.startswith("no models are here")

"""Models by name, from a hub on loopback: what is fetched, what is not, and what is said."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pegainfer.app import hub
from pegainfer.app.hub import FetchOptions, HubName, Listing
from pegainfer.app.resolve import ModelRef, resolve
from pegainfer.contract.errors import ConfigError, UnsupportedError
from tests.support.fake_hub import FakeHub, serving
from tests.support.tinymodel import Tiny

CONFIG = json.dumps(Tiny("tiny", seed=1).hf_config()).encode()
WHOLE = {
    "config.json": CONFIG,
    "tokenizer.json": b"{ }",
    "model-00001-of-00002.safetensors": b"w" * 9,
    "model-00002-of-00002.safetensors": b"v" * 9,
    "model.safetensors.index.json": b"{  }",
    "chat_template.jinja": b"{{ 1 }}",
    "original/consolidated.safetensors": b"other layout",
    "consolidated.safetensors": b"other layout",
    "modeling_custom.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "README.md": b"#",
}
QUANTS = {"M-Q8_0.gguf": b"GGUF8", "M-Q4_K_M.gguf": b"GGUF4", "bf16/M-BF16.gguf": b"GGUF16"}
PARTS = ["Q8_0/B-Q8_0-00001-of-00002.gguf", "Q8_0/B-Q8_0-00002-of-00002.gguf"]
SPLIT = {PARTS[1]: b"GGUF82", PARTS[0]: b"GGUF81", "B-Q4_K_M.gguf": b"GGUF4"}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import constants

    repositories = {"o/whole": WHOLE, "o/quants": QUANTS, "o/split": SPLIT, "o/gated": WHOLE}
    repositories |= {"o/empty": {"README.md": b"#"}}
    with serving(FakeHub(repositories, gated={"o/gated"})) as fake:
        monkeypatch.setenv("HF_ENDPOINT", fake.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.chdir(tmp_path)
        yield fake


def test_a_model_is_fetched_once_and_nothing_that_runs(fake: FakeHub) -> None:
    ref = resolve("o/whole")
    assert ref.kind == "folder" and ref.name == "o/whole"
    assert (ref.path / "model-00002-of-00002.safetensors").read_bytes() == b"v" * 9
    wanted = sorted(n for n in WHOLE if "/" not in n and n.startswith(("config", "tok", "model", "chat")))
    assert sorted(fake.fetched) == [n for n in wanted if not n.endswith(".py")]
    fake.fetched.clear()
    assert resolve("o/whole") == ref == resolve("o/whole", offline=True)
    assert not fake.fetched


def test_without_weights(fake: FakeHub) -> None:
    ref = resolve("o/whole", weights=False)
    assert not list(ref.path.glob("*.safetensors")) and (ref.path / "config.json").exists()


def test_a_vocabulary_of_ranks(fake: FakeHub) -> None:
    fake.repositories["o/m"] = {
        "tiktoken.model" if name == "tokenizer.json" else name: data for name, data in WHOLE.items()
    }
    assert (resolve("o/m").path / "tiktoken.model").exists()


def test_a_local_folder_of_that_name_comes_first(fake: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "o" / "whole"
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "a.safetensors"):
        (folder / name).write_bytes(b"{}")
    assert resolve("o/whole") == ModelRef("folder", Path("o/whole"), "whole")
    assert not fake.fetched


@pytest.mark.parametrize(
    ("reference", "content", "name"),
    [
        ("o/quants", b"GGUF4", "M-Q4_K_M"),  # the usual choice where there are several
        ("o/quants:q8_0", b"GGUF8", "o/quants:q8_0"),
        ("o/quants:BF16", b"GGUF16", "o/quants:BF16"),
        ("o/quants/bf16/M-BF16.gguf", b"GGUF16", "M-BF16"),
    ],
)
def test_one_gguf_of_several(fake: FakeHub, reference: str, content: bytes, name: str) -> None:
    ref = resolve(reference)
    assert (ref.kind, ref.path.read_bytes(), ref.name) == ("gguf", content, name)
    assert len(fake.fetched) == 1
    assert resolve(reference, offline=True) == ref


@pytest.mark.parametrize(
    ("reference", "name"),
    [("o/split:Q8_0", "o/split:Q8_0"), *((f"o/split/{part}", "B-Q8_0") for part in PARTS)],
)
def test_all_parts_of_a_split_gguf(fake: FakeHub, reference: str, name: str) -> None:
    ref = resolve(reference)
    assert (ref.kind, ref.path.read_bytes(), ref.name) == ("gguf", b"GGUF81", name)
    assert ref.path.with_name("B-Q8_0-00002-of-00002.gguf").read_bytes() == b"GGUF82"
    assert sorted(fake.fetched) == PARTS
    assert resolve(reference, offline=True) == ref


@pytest.mark.parametrize(
    ("reference", "revision", "match"),
    [
        ("o/none", None, "no such model.*o/none.*check the name"),
        ("o/gated", None, "gated.*accept its terms.*HF_TOKEN"),
        ("o/whole", "v9", "no such revision; at o/whole at v9"),
        ("o/quants:Q5", None, r"no such GGUF file; expected M-Q4_K_M.gguf M-Q8_0.gguf.*got Q5"),
        ("o/quants:Q4", None, "no such GGUF file"),  # a part of a word names nothing
        ("o/empty", None, "holds no whole model"),
        ("smollm2-135m-instruct", "main", "only models of the hub have revisions"),
    ],
)
def test_what_cannot_be_fetched(fake: FakeHub, reference: str, revision: str | None, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        resolve(reference, revision=revision)


def test_without_a_network(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ref = resolve("o/whole")
    online = hub._list

    def unreachable(name: HubName, options: FetchOptions) -> Listing:
        if not options.offline:
            raise httpx.ConnectError("refused", request=httpx.Request("GET", "http://x"))
        return online(name, options)

    monkeypatch.setattr(hub, "_list", unreachable)
    assert resolve("o/whole") == ref
    assert "cannot be reached: o/whole as it was fetched before" in caplog.text
    with pytest.raises(ConfigError, match=r"cannot be reached; got ConnectError: refused.*HF_ENDPOINT"):
        resolve("o/quants")
    with pytest.raises(ConfigError, match=r"was not fetched before.*leave --offline out"):
        resolve("o/quants", offline=True)


def test_a_hub_that_does_not_answer_is_told_of_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    said = []

    def warning(text: str, *args: object) -> None:
        said.append(text % args)
        told.set()

    monkeypatch.setattr(hub, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(hub.log, "warning", warning)

    class Info:
        siblings = ()

    def answer(self: object, repository: str, **options: object) -> Info:
        assert told.wait(30)
        return Info()

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", answer)
    assert hub._list(HubName("o/slow"), FetchOptions()) == Listing({}, None)
    assert said == ["the hub has not answered yet for o/slow; serve --offline takes what was fetched before"]


@pytest.mark.parametrize("reference", ["m", "/a/b", "./a/b", "a/b/c", "a/../b", "-a/b", "a/b:", "a/b c"])
def test_what_is_no_name_of_the_hub(reference: str) -> None:
    assert HubName.parse(reference) is None


MOE = json.dumps({"architectures": ["MixtralForCausalLM"]}).encode()
AWQ = json.dumps(
    {**Tiny("tiny", seed=1).hf_config(), "quantization_config": {"quant_method": "awq", "version": "gemv"}}
).encode()


@pytest.mark.parametrize(
    ("files", "architecture", "expected"),
    [
        (
            {**WHOLE, "config.json": MOE},
            "",
            "no model line for this architecture; .*got 'MixtralForCausalLM'",
        ),
        ({**WHOLE, "config.json": AWQ}, "", "quantization_config: version is not supported; expected gemm"),
        (
            {k: v for k, v in WHOLE.items() if k != "tokenizer.json"},
            "",
            r"holds no whole model.*no tokenizer\.json",
        ),
        ({"M-Q4_K_M.gguf": b"GGUF"}, "mamba", "no model line for this architecture; .*got 'mamba'"),
        (
            {"M-IQ2_XS.gguf": b"GGUF", "M-IQ3_M.gguf": b"GGUF"},
            "llama",
            r"no GGUF file of o/m is served; .*iq2_xs not served; M-IQ3_M.gguf: iq3_s not served",
        ),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_before_its_weights_are_fetched(
    fake: FakeHub, files: dict[str, bytes], architecture: str, expected: str
) -> None:
    fake.repositories["o/m"] = files
    if architecture:
        fake.architectures["o/m"] = architecture
    with pytest.raises((UnsupportedError, ConfigError), match=expected):
        resolve("o/m")
    assert set(fake.fetched) <= {"config.json"}


def test_what_is_fetched_is_told_with_the_reason(fake: FakeHub) -> None:
    said: list[str] = []
    resolve("o/quants", tell=said.append)
    resolve("o/quants", tell=said.append)  # it is here now
    (line,) = said
    assert line.startswith(
        "o/quants: fetching M-Q4_K_M.gguf (0.0 GiB): the usual balance of size, speed and "
    )


def test_a_split_model_is_told_of_until_every_part_is_here(fake: FakeHub) -> None:
    said: list[str] = []
    resolve(f"o/split/{PARTS[1]}", tell=said.append)
    assert said == [f"o/split: fetching {PARTS[0]} (2 parts, 0.0 GiB): it was named"]
    path = resolve("o/split:Q8_0", tell=said.append).path
    assert len(said) == 1
    path.with_name("B-Q8_0-00002-of-00002.gguf").unlink()
    resolve("o/split:Q8_0", tell=said.append)
    assert len(said) == 2


def test_models_go_to_a_folder_of_their_own(fake: FakeHub, tmp_path: Path) -> None:
    ref = resolve("o/quants:Q8_0", download_dir=str(tmp_path / "own"))
    assert ref.path.is_relative_to(tmp_path / "own")
    assert resolve("o/quants:Q8_0", download_dir=str(tmp_path / "own"), offline=True) == ref
    with pytest.raises(ConfigError, match="was not fetched before"):
        resolve("o/quants:Q8_0", offline=True)

"""Which models a server with several of them has, and which flags make no sense there."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegainfer.app.config import EngineConfig
from pegainfer.app.options import parse_duration
from pegainfer.cli.flags import Given
from pegainfer.cli.fleet_flags import FleetFlags, choose_all, of_several
from pegainfer.cli.target import ModelFlags
from pegainfer.contract.errors import ConfigError
from pegainfer.engine.config import SchedulerConfig
from pegainfer.frontend.http.config import HttpConfig
from tests.support.server import pega_here

NULL = ("--device", "null")


def names(references: list[str], **fleet: str) -> list[str]:
    flags = FleetFlags(**fleet)  # type: ignore[arg-type]
    parts = ModelFlags(tokenizer="/of/the/environment"), EngineConfig(), SchedulerConfig(), flags, Given()
    return [target.spec.name for target in choose_all(references, *parts)]


def test_the_models_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("b.gguf", "c-00001-of-00002.gguf", "c-00002-of-00002.gguf", "notes.txt"):
        (tmp_path / name).touch()
    for folder, files in (
        ("a", ("config.json", "tokenizer.json", "x.safetensors")),
        ("half", ("config.json",)),
    ):
        (tmp_path / folder).mkdir()
        for file in files:
            (tmp_path / folder / file).write_text("{}")
    (tmp_path / "empty").mkdir()
    assert names([], models_dir=str(tmp_path)) == ["a", "b", "c"]
    assert "half is left out: the folder holds no whole model" in capsys.readouterr().err
    other = tmp_path / "empty" / "d.gguf"
    other.touch()
    assert names([str(other)], models_dir=str(tmp_path)) == ["d", "a", "b", "c"]
    with pytest.raises(ConfigError, match="two models have one name; got b"):
        names([str(tmp_path / "b.gguf")], models_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="no models are there"):
        names([], models_dir=str(tmp_path / "half"))


def test_what_the_environment_sets_for_one_model_is_left_aside() -> None:
    http = of_several(HttpConfig(served_model_name=("a",), trace="/tmp", port=1))
    assert http == HttpConfig(port=1)
    engine = EngineConfig(role="decode", prefill_peers="127.0.0.1:1")
    parts = ModelFlags(device="null"), engine, SchedulerConfig(), FleetFlags(), Given()
    assert [target.spec.engine for target in choose_all(["a", "b"], *parts)] == 2 * [EngineConfig()]


def test_durations() -> None:
    texts = ("300", "5m", "1.5h", "2d", "-1", "30s", "0")
    assert [parse_duration(text) for text in texts] == [300, 300, 5400, 172800, -1, 30, 0]
    for text in ("", "m", "5 weeks", "soon"):
        with pytest.raises(ConfigError, match="not a duration"):
            parse_duration(text)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("a", "a", *NULL), "two models have one name; got a"),
        (
            ("a", "b", *NULL, "--served-model-name", "c"),
            "--served-model-name does not apply to several models",
        ),
        (("a", "b", *NULL, "--role", "prefill"), "--role does not apply to several models"),
        (("a", "b", "--prefill-peers", "127.0.0.1:1"), "--prefill-peers does not apply to several models"),
        (("a", "b", *NULL, "--role", "decode"), "--role does not apply to several models"),
        (("a", "b", "--device", "cuda"), "the memory of several models on a GPU must be planned"),
        (("a", "/nowhere/b.gguf"), "no such model"),
        ((*NULL, "--keep-alive", "5m"), "--keep-alive does not apply"),
        (("a", "b", *NULL, "--keep-alive", "soon"), "not a duration"),
        (("--models-dir", "/nowhere"), "cannot read the folder of models"),
    ],
)
def test_what_makes_no_sense_is_refused(argv: tuple[str, ...], said: str) -> None:
    done = pega_here("serve", *argv, "--port", "0")
    assert done.returncode == 2, done.stderr
    assert said in done.stderr and len(done.stderr.splitlines()) == 1

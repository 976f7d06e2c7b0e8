"""Options from the command line, the environment and a config file, under the names of several engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from pegainfer.app.config import EngineConfig
from pegainfer.app.options import ALIASES, OPPOSITES, SEVERAL, name_of
from pegainfer.app.unserved import SHORT, UNSERVED
from pegainfer.cli.command_line import ModelCommand
from pegainfer.cli.commands import build_app
from pegainfer.cli.flags import Given, expand, flag_fields
from pegainfer.cli.target import ModelFlags
from pegainfer.contract.errors import ConfigError
from pegainfer.engine.config import SchedulerConfig
from pegainfer.frontend.http.config import HttpConfig
from tests.support.server import pega_here

CONFIGS = (ModelFlags, EngineConfig, SchedulerConfig, HttpConfig)


class Told:
    """What a command was told, by option."""

    def __init__(self, model: str | None, configs: list[Any], given: Given) -> None:
        self.model, self.given = model, given
        self._values = {name_of(f.name): getattr(c, f.name) for c in configs for f in flag_fields(type(c))}

    def __getitem__(self, option: str) -> Any:
        return self._values[option]


def serve(*argv: str) -> Told:
    got: list[Told] = []

    def command(
        model: Annotated[str | None, typer.Argument()] = None,
        *,
        flags: ModelFlags,
        engine: EngineConfig,
        scheduler: SchedulerConfig,
        http: HttpConfig,
        given: Given,
    ) -> None:
        got.append(Told(model, [flags, engine, scheduler, http], given))

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(cls=ModelCommand)(expand(command))
    app(list(argv), standalone_mode=False)
    (only,) = got
    return only


def message(*argv: str) -> str:
    """Of the error that a command line ends in."""
    with pytest.raises(Exception) as caught:
        serve(*argv)
    assert isinstance(caught.value, ConfigError) or hasattr(caught.value, "format_message")
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("argv", "option", "value"),
    [
        ("--max-num-batched-tokens 512", "max_prefill_tokens", 512),
        ("--max_num_batched_tokens=512", "max_prefill_tokens", 512),
        ("--enable-prefix-caching", "prefix_cache", True),
        ("--no-enable-prefix-caching", "prefix_cache", False),
        ("--disable-radix-cache", "prefix_cache", False),
        ("--enforce-eager", "cuda_graph", False),
        ("--no-enforce-eager", "cuda_graph", True),
        ("--dtype bfloat16", "activation_dtype", "bf16"),
        ("--dtype float32", "activation_dtype", "f32"),
        ("--kv-cache-dtype float16", "kv_cache_dtype", "f16"),
        ("--kv-cache-dtype fp8", "kv_cache_dtype", "fp8"),
        ("--kv-cache-dtype fp8_e4m3", "kv_cache_dtype", "fp8"),
        ("--kv-cache-memory-bytes 2G", "kv_cache_memory", 2 << 30),
        ("--max-model-len 4k", "max_model_len", 4000),
        ("--max-model-len 4K", "max_model_len", 4096),
        ("--context-length 4096", "max_model_len", 4096),
        ("--max-running-requests 3", "max_num_seqs", 3),
        ("-np 3", "max_num_seqs", 3),
        ("-t 3", "threads", 3),
        ("-t3", "threads", 3),
        ("-hf owner/model:Q8_0", "model", "owner/model:Q8_0"),
        ("-a name", "served_model_name", ("name",)),
        ("--tokenizer-path somewhere", "tokenizer", "somewhere"),
        ("--chat-template-file mine.jinja", "chat_template", "mine.jinja"),
        ("--trust-request-chat-template", "request_chat_template", True),
        ("--h11-max-incomplete-event-size 4096", "max_header_bytes", 4096),
        ("-tp 2", "tensor_parallel_size", 2),
        ("--tp-size 2", "tensor_parallel_size", 2),
        ("-dp 2", "data_parallel_size", 2),
        ("--dp 2", "data_parallel_size", 2),
    ],
)
def test_names_of_other_engines(argv: str, option: str, value: Any) -> None:
    assert serve(*argv.split())[option] == value


@pytest.mark.parametrize(
    "argv",
    [
        "--pipeline-parallel-size 1", "--pipeline-parallel-size=1", "-pp 1", "--enable-chunked-prefill",
        "--no-trust-remote-code", "--block-size 16", "--task generate", "--swap-space 0", "-fa on", "-ngl -1",
        "--disable-log-requests", "--enable-auto-tool-choice", "--jinja", "--trust-remote-code",
        "--runner pooling", "--task embed", "--is-embedding", "--reranking",
    ],
)  # fmt: skip
def test_flags_that_state_what_holds_here_are_taken(argv: str) -> None:
    told = serve("m", *argv.split(), "--port", "1")
    assert (told.model, told["port"], told.given) == ("m", 1, {"--port"})


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            "--pipeline-parallel-size 2",
            "--pipeline-parallel-size 2 is not served here; remedy: one process computes",
        ),
        ("-pp 2", "-pp 2 is not served here"),
        ("--no-enable-chunked-prefill", "--no-enable-chunked-prefill false is not served here"),
        ("-c 4096", "-c 4096 is not served here; remedy: use --max-model-len"),
        ("-ngl 99", "-ngl 99 is not served here; remedy: --device cuda"),
        ("--top-k 5", "remedy: requests say this, each for itself; --override-generation-config"),
        ("--lora-paths a=b", "remedy: use --enable-lora and --lora-modules"),
        ("--quantization awq", "remedy: leave it out for a quantised file: its formats are read from it"),
        ("--allowed_origins ['*']", "remedy: use --allowed-origin"),
        (
            "--mem-fraction-static=0.8",
            "--mem-fraction-static 0.8 is not served here; remedy: use",
        ),
    ],
)
def test_other_flags_name_what_takes_their_place(argv: str, expected: str) -> None:
    assert expected in message(*argv.split())


def test_the_tables_do_not_contradict_each_other() -> None:
    options = {name_of(f.name) for config in CONFIGS for f in flag_fields(config)}
    aliases = [alias for table in (ALIASES, OPPOSITES) for names in table.values() for alias in names]
    assert len(set(aliases)) == len(aliases)
    assert not {*aliases, *options} & UNSERVED.keys()
    assert not set(aliases) & options
    assert {*OPPOSITES, *SEVERAL} <= options
    assert set(SHORT.values()) <= {*aliases, *options, *UNSERVED}


def test_what_the_tables_recommend_exists() -> None:
    """A remedy that names a flag names one that the server has."""
    import re

    params = typer.main.get_command(build_app()).commands["serve"].params  # type: ignore[attr-defined]
    known = {name for p in params for name in (*p.opts, *p.secondary_opts)}
    named = {flag for u in UNSERVED.values() for flag in re.findall(r"--[a-z-]*[a-z]", u.instead)}
    assert len(named) > 10
    assert named <= known


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name"])
def test_several_values_after_one_name(flag: str) -> None:
    option = flag[2:].replace("-", "_")
    for argv in (
        ["m", flag, "a", "b", "c"],
        ["--model=m", flag, "a", "b", "c"],
        [flag, "a", "b", "c", "-m", "m"],
    ):
        told = serve(*argv)
        assert told[option] == ("a", "b", "c")
        assert (told.model or told["model"]) == "m"
    assert serve("m", flag, "a", flag, "b", "c")[option] == ("a", "b", "c")
    told = serve("m", flag, "a", "b", "--port", "1")
    assert (told[option], told["port"]) == (("a", "b"), 1)


def test_one_word_behind_a_value_is_the_model_where_none_is_named() -> None:
    told = serve("--api-key", "a", "m")
    assert (told["api_key"], told.model) == (("a",), "m")
    assert "expected MODEL before --api-key" in message("--api-key", "a", "b", "m")
    assert "secret" not in message("--api-key", "secret", "secret", "m")


def test_the_environment_sets_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGAINFER_MAX_MODEL_LEN", "4k")
    monkeypatch.setenv("PEGAINFER_PREFIX_CACHE", "false")
    monkeypatch.setenv("PEGAINFER_SERVED_MODEL_NAME", "a b")
    monkeypatch.setenv("PEGAINFER_THREADS", "3")
    told = serve("--threads", "2")
    assert (told["max_model_len"], told["prefix_cache"], told["served_model_name"]) == (
        4000,
        False,
        ("a", "b"),
    )
    assert told["threads"] == 2  # what is typed goes first
    assert told.given.environment == {"--max-model-len", "--prefix-cache", "--served-model-name"}


def test_what_the_environment_sets_need_not_apply_to_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGAINFER_THREADS", "3")
    serve().given.refuse(EngineConfig, "--device cuda")
    with pytest.raises(ConfigError, match="--threads does not apply"):
        serve("--threads", "3").given.refuse(EngineConfig, "--device cuda")


def test_faulty_values_of_the_environment_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGAINFER_PORT", "many")
    assert "(set by PEGAINFER_PORT)" in message()
    monkeypatch.setenv("PEGAINFER_PORT", "tcp://10.0.0.1:8000")  # of Kubernetes, for a Service of this name
    assert serve()["port"] == 8000
    monkeypatch.setenv("PEGAINFER_PREFIX_CACHE", "perhaps")
    assert message() == "not a switch; expected true or false; got perhaps; at PEGAINFER_PREFIX_CACHE"


def test_a_config_file_sets_options(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file(
        "model: m\nport: 6379\nserved-model-name: [a, b]\nmax_model_len: 4k\nenforce-eager: true\n"
        "enable-prefix-caching: false\noverride-generation-config:\n  temperature: 0.2\napi-key: k\n"
        "pipeline-parallel-size: 1\n"
    )
    told = serve("--config", path)
    assert (told["model"], told["port"], told["served_model_name"]) == ("m", 6379, ("a", "b"))
    assert (told["max_model_len"], told["cuda_graph"], told["prefix_cache"]) == (4000, False, False)
    assert (told["override_generation_config"], told["api_key"]) == ('{"temperature": 0.2}', ("k",))
    told = serve("other", f"--config={path}", "--port", "1", "--served-model-name", "c")
    assert (told.model, told["model"], told["port"], told["served_model_name"]) == ("other", None, 1, ("c",))
    monkeypatch.setenv("PEGAINFER_PORT", "2")
    monkeypatch.setenv("PEGAINFER_CONFIG", path)
    assert (serve()["port"], serve()["max_model_len"]) == (2, 4000)  # the environment goes before the file


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max-model-length: 5", "no such option; got max-model-length; at "),
        ("port:", "the option has no value; at "),
        ("prefix-cache: 7", "not a switch; expected true or false; got 7; at "),
        ("api-key: []", "not a list of values; expected texts or numbers; got []; at "),
        ("api-key: [{a: b}]", "not a list of values"),
        (
            "- port",
            "the config file holds no options; expected lines such as 'max-model-len: 4096'; got list",
        ),
        ("port: [", "the config file is not valid YAML; got "),
        ("port: 1\n--port: 2", "no such option; got --port"),
        ("max-model-len: 8\nmax_model_len: 9", "an option is set twice; got max-model-len and max_model_len"),
        ("pipeline-parallel-size: 2", "pipeline-parallel-size 2 is not served here"),
        ("config: other.yaml", "no such option; got config"),
    ],
)
def test_faulty_config_files(file: Any, text: str, expected: str) -> None:
    assert expected in message("--config", file(text))


def test_a_config_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "cannot read the config file: No such file or directory; at --config " in message(
        "--config", str(tmp_path / "none.yaml")
    )
    with (tmp_path / "large.yaml").open("wb") as f:
        f.truncate((1 << 20) + 1)
    assert "the config file is too large" in message("--config", str(tmp_path / "large.yaml"))


def test_a_real_command_reads_all_three(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGAINFER_MODEL", "nowhere.gguf")
    done = pega_here("generate", "hi")
    assert done.returncode == 2 and "got 'nowhere.gguf'" in done.stderr
    done = pega_here("chat", "--config", file("model: elsewhere.gguf\nmax-model-len: 4k"), "--offline")
    assert done.returncode == 2 and "got 'nowhere.gguf'" in done.stderr
    monkeypatch.delenv("PEGAINFER_MODEL")
    done = pega_here("chat", "--config", file("model: elsewhere.gguf\nmax-model-len: 4k"), "--offline")
    assert done.returncode == 2 and "got 'elsewhere.gguf'" in done.stderr

"""Which device a command runs on, and which flags it then obeys; without a GPU and without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pegainfer.app.config import EngineConfig
from pegainfer.cli.flags import Given, flag_fields, flag_of
from pegainfer.cli.spec import build
from pegainfer.cli.target import APPLIES, ModelFlags, Target, choose
from pegainfer.contract.errors import ConfigError
from pegainfer.engine.config import SchedulerConfig
from pegainfer.null.runner import NullRunner
from pegainfer.parallel.group import RankGroup
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.fake_kernels import write_kernels
from tests.support.server import pega_here


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that looks whole from outside."""
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    return str(tmp_path)


def chosen(model: str, device: str, *typed: str, **options: Any) -> Target:
    flags = ModelFlags(device=device)  # type: ignore[arg-type]
    return choose(model, flags, EngineConfig(**options), SchedulerConfig(), Given(typed))


@pytest.mark.parametrize("flag", ["--model", "-m", "--model-path"])
@pytest.mark.parametrize(
    "command",
    ["serve --port 0", "generate hi", "chat", "run-batch -i in -o out", "doctor --plan", "bench engine",
     "bench ops", "bench perplexity --text in", "bench startup"],
)  # fmt: skip
def test_every_command_takes_its_model_by_the_names_that_users_know(
    command: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").write_text("{}\n")
    done = pega_here(*command.split(), flag, "nowhere.gguf")
    assert done.returncode == 2
    assert "error: no such model; " in done.stderr and "got 'nowhere.gguf'" in done.stderr


def test_auto_is_the_gpu_where_it_can_run(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = write_kernels(tmp_path / "kernels")
    monkeypatch.setattr("pegainfer.kernels.load.folders", lambda: (kernels,))
    with fake_cuda():
        assert chosen(model, "auto").spec.engine.backend == "cuda"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (FakeCuda(devices=0), "no usable NVIDIA GPU"),
        (FakeCuda(version=12040), "driver is too old; expected CUDA 13000; got CUDA 12040"),
        (FakeCuda(), "no kernels were built for Fake GPU (sm_90a)"),
        (FakeCuda(capability=(7, 0)), "compute capability 7.0"),
    ],
)
def test_auto_is_the_cpu_otherwise_and_says_why_in_one_line(
    fake: FakeCuda, reason: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("pegainfer.kernels.load.folders", lambda: (tmp_path / "nothing",))
    with fake_cuda(fake):
        assert chosen(model, "auto").spec.engine.backend == "cpu"
    said = capsys.readouterr().err
    assert said.startswith("pegainfer: running on the CPU: ") and reason in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("device", "flag"),
    [
        ("cpu", "--gpu-memory-utilization"),
        ("cpu", "--cuda-graph"),
        ("cuda", "--threads"),
        ("reference", "--activation-dtype"),
        ("reference", "--device-ordinal"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(device: str, flag: str, model: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} does not apply; at --device {device}"):
        chosen(model, device, flag)


@pytest.mark.parametrize(
    ("device", "option", "message"),
    [
        ("reference", "tensor_parallel_size", "backend reference has one rank"),
        *((d, "data_parallel_size", "only the null device has data") for d in ("cpu", "cuda", "reference")),
    ],
)
def test_ranks_are_refused_where_a_device_has_one(device: str, option: str, message: str, model: str) -> None:
    flag = "--" + option.replace("_", "-")
    assert chosen(model, device, flag, **{option: 1}).spec.engine.backend == device
    with pytest.raises(ConfigError, match=f"{message}.*got 2; at {option}"):
        chosen(model, device, flag, **{option: 2})


@pytest.mark.parametrize("lora", [False, True])
def test_the_cpu_has_ranks_with_adapters_and_without(lora: bool, model: str) -> None:
    flag = "--tensor-parallel-size"
    target = chosen(model, "cpu", flag, tensor_parallel_size=2, enable_lora=lora)
    assert (target.spec.engine.tensor_parallel_size, target.spec.engine.enable_lora) == (2, lora)


def test_the_null_device_has_as_many_ranks_as_are_asked_for() -> None:
    flags, config = ModelFlags(device="null"), EngineConfig(tensor_parallel_size=2, data_parallel_size=3)
    typed = Given(("--tensor-parallel-size", "--data-parallel-size"))
    target = choose(None, flags, config, SchedulerConfig(max_slots=8), typed)
    engine = build(target.spec)
    assert isinstance(engine.runner, RankGroup) and len(engine.runner.ranks) == 6
    assert (engine.runner.info.data_ranks, engine.runner.info.max_slots) == (3, 9)
    assert engine.info.num_blocks == 3 * engine.runner.info.num_blocks[0]
    build_one = build(choose(None, flags, EngineConfig(), SchedulerConfig(), Given(())).spec)
    assert isinstance(build_one.runner, NullRunner)  # a device alone is no group


def test_dummy_weights_need_no_files(model: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").unlink()
    for device in ("cpu", "cuda", "reference"):
        assert chosen(model, device, load_format="dummy").spec.engine.load_format == "dummy"
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        chosen(model, "cuda")


def test_every_flag_applies_to_a_device() -> None:
    flags = {flag_of(field) for field in flag_fields(EngineConfig)}
    assert flags == {flag for obeyed in APPLIES.values() for flag in obeyed}


@pytest.mark.parametrize("device", ["cpu", "cuda", "reference"])
@pytest.mark.parametrize(
    "options",
    [
        {"kv_offload": 2**30, "kv_offload_disk": "/kv:1GiB", "snapshot_share": 0.1},
        {"kv_offload": 2**30, "role": "prefill", "peer_listen": "127.0.0.1:7600", "peer_timeout": 2.0},
        {"role": "decode", "prefill_peers": "127.0.0.1:7600", "peer_secret_file": "secret"},
        {"quantization": "fp8"},
    ],
)
def test_tiers_peers_and_formats_are_for_every_device_with_a_model(
    model: str, device: str, options: dict[str, Any]
) -> None:
    typed = ["--" + name.replace("_", "-") for name in options]
    engine = chosen(model, device, *typed, **options).spec.engine
    assert {name: getattr(engine, name) for name in options} == options


def test_a_gpu_is_shared_by_several_ranks_alone(model: str) -> None:
    with pytest.raises(ConfigError, match="no other ranks to share the GPU with"):
        chosen(model, "cuda", "--share-gpu", share_gpu=True)

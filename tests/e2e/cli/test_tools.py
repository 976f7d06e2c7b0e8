"""doctor and the benches as commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.default_model import default_model
from tests.support.server import pega


def test_doctor_names_what_it_found(tmp_path: Path) -> None:
    done = pega("doctor", "--kv-offload-disk", f"{tmp_path}:1GiB")
    assert done.returncode == 0, done.stdout
    rates = r"[0-9.]+ GB/s written, [0-9.]+ GB/s read, checksums included"
    assert re.search(rf"^disk tier +{re.escape(str(tmp_path))}: {rates}$", done.stdout, re.MULTILINE)
    assert re.search(r"^memory copy +[0-9.]+ GB/s by one thread$", done.stdout, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []  # nothing of the measurement stays
    found = dict(
        line.split(maxsplit=1) for line in done.stdout.replace("cpu kernels", "kernels").splitlines()
    )
    assert re.search(r"\d cores usable", found["cpu"])
    assert re.search(r"GB/s read by one thread", found["bandwidth"])
    assert re.match(r"(avx512|avx2|portable) chosen of .*portable", found["kernels"])


def test_doctor_says_what_keeps_a_disk_tier_from_being_used(tmp_path: Path) -> None:
    done = pega("doctor", "--kv-offload-disk", f"{tmp_path / 'none'}:1GiB")
    assert done.returncode == 1
    assert re.search(r"^disk tier +MISSING: no such folder", done.stdout, re.MULTILINE)


def test_the_plan_has_every_layer_with_bytes_and_flops() -> None:
    default_model()
    done = pega("doctor", "--plan", "--tokens", "8", "--rows", "2")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"llama: 152 calls at T=8 R=2 L=2.*; arena \d+ bytes", lines[0])
    calls = [line.split() for line in lines if re.match(r" +\d+ ", line)]
    assert [c[1] for c in calls[:6]] == [
        "embedding",
        "qkv_norm_rope_append",
        "attention",
        "linear_residual",
        "gate_up_swiglu",
        "linear_residual",
    ]
    # 30 layers, an embedding and a head; the totals are the sums of the calls.
    assert len(calls) == 30 * 5 + 2
    (total,) = (line.split() for line in lines if line.split()[:1] == ["total"])
    assert int(total[1]) == sum(int(c[2]) for c in calls)
    assert int(total[2]) == sum(int(c[3]) for c in calls)
    # The head of 2 rows: 2 · 2 · 576 · 49,152.
    assert int(calls[-1][3]) == 113_246_208


def test_launches_are_listed_without_a_gpu_from_a_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560,
                "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
                "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
                "rope_theta": 1e6, "max_position_embeddings": 4096, "tie_word_embeddings": True,
            }
        )
    )  # fmt: skip
    flags = ("--plan", "--device", "cuda", "--load-format", "dummy", "--tokens", "8", "--rows", "8")
    done = pega("doctor", str(tmp_path), *flags, "--arch", "90a")
    assert done.returncode == 0, done.stderr
    assert "Launches on NVIDIA H100 80GB HBM3, sm_90a" in done.stdout
    assert (
        len(re.findall(r"^append_attention .* attention_decode_append_bf16_d128 ", done.stdout, re.M)) == 36
    )
    assert "measured on NVIDIA H100 80GB HBM3 up to 16 rows" in done.stdout
    assert "step L=8 J=0 E=0 U=0 O=0: 7 launches" in done.stdout
    unknown = pega("doctor", str(tmp_path), *flags, "--arch", "70")
    assert unknown.returncode != 0 and "expected 80 86 89 90a 100a 120a" in unknown.stderr
    cpu = pega("doctor", "--plan", "--arch", "90a")
    assert cpu.returncode != 0 and "only a GPU has an architecture" in cpu.stderr


def test_bench_engine_appends_lines_that_say_where_they_were_made(tmp_path: Path) -> None:
    out = tmp_path / "results" / "engine.jsonl"
    sizes = ["--prefill", "64", "--batch", "1", "--batch", "3", "--decode", "8", "--rounds", "2"]
    for _ in range(2):
        done = pega("bench", "engine", "--device", "null", *sizes, "--output", str(out))
        assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["case"], r["tokens"], r["batch"]) for r in rows] == 2 * [
        ("prefill", 64, 1),
        ("decode", 8, 1),
        ("decode", 8, 3),
    ]
    for row in rows:
        assert row.keys() >= {"time", "commit", "command", "cpu", "cores", "read_gb_s"}
        assert len(row["runs"]) == 2
        assert min(row["runs"]) <= row["tok_s"] <= max(row["runs"])


def test_bench_startup_weighs_all_processes(tmp_path: Path) -> None:
    out = tmp_path / "startup.jsonl"
    done = pega("bench", "startup", "--device", "null", "--rounds", "1", "--output", str(out))
    assert done.returncode == 0, done.stderr
    (row,) = (json.loads(line) for line in out.read_text().splitlines())
    assert row["ready_s"] > 0
    # Two interpreters with their libraries: more than one alone has, less than anything that holds a model.
    assert 20 < row["pss_mb"] < 400

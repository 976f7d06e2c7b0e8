"""The launches that steps of published models are bound to, on a driver without a GPU, as text to compare.

Two builds whose lists are equal put the same work on the stream. `python -m tests.support.launch_lists
FOLDER` writes the lists of every case; `diff -r` of two such folders shows what a change has changed.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.store import Dummy
from pegainfer.models.llama import engine as llama
from pegainfer.models.qwen3 import engine as qwen3
from pegainfer.ops.program import Program
from pegainfer.ops.sampler import hidden_states, prompt_logprobs, sampler
from pegainfer.ops.tensor import Kind
from pegainfer.runner.model import LineModel
from pegainfer.runner.program import Formats, Sizes
from pegainfer.runtime.cuda.launch import Launch
from pegainfer.runtime.cuda.tensor import DeviceTensor
from tests.support.fake_cuda import FakeCuda, FakeLt, fake_cuda, fake_kernels

SLOTS, TOKENS, LENGTH = 256, 2048, 4096
DECODES = range(1, 257)
PREFILLS = [
    (t, r)
    for r in (1, 8, 64)
    for t in (1, 2, 5, 8, 16, 17, 32, 64, 65, 96, 128, 129, 160, 192, 256, 257, 300, 512, 1024, 2048)
    if r <= t
]
CARDS: dict[str, dict[str, Any]] = {
    "90a": {},
    "80": {"capability": (8, 0), "num_sms": 108, "shared": 163 << 10},
    "89": {"capability": (8, 9), "num_sms": 142, "shared": 99 << 10},
    "120a": {"capability": (12, 0), "num_sms": 188, "shared": 99 << 10},
}


def qwen(hidden: int, heads: int, kv_heads: int, wide: int, tied: bool, layers: int) -> LineModel:
    return qwen3.from_config(
        {
            "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": wide,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "max_position_embeddings": LENGTH, "tie_word_embeddings": tied,
        },
        "config.json",
    )  # fmt: skip


def llama_like(
    hidden: int, heads: int, kv_heads: int, wide: int, vocab: int, tied: bool, layers: int
) -> LineModel:
    return llama.from_config(
        {
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": wide,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "vocab_size": vocab, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "max_position_embeddings": LENGTH,
            "tie_word_embeddings": tied,
        },
        "config.json",
    )  # fmt: skip


def model(name: str, layers: int) -> LineModel:
    return {
        "Qwen3-0.6B": lambda n: qwen(1024, 16, 8, 3072, True, n),
        "Qwen3-4B": lambda n: qwen(2560, 32, 8, 9728, True, n),
        "Qwen3-8B": lambda n: qwen(4096, 32, 8, 12288, False, n),
        "Llama-3.1-8B": lambda n: llama_like(4096, 32, 8, 14336, 128256, False, n),
        "SmolLM2-135M": lambda n: llama_like(576, 9, 3, 1536, 49152, True, n),
    }[name](layers)


@dataclass(frozen=True)
class Case:
    """One program of one model on one card."""

    model: str
    arch: str = "90a"
    dtype: str = "bf16"
    layers: int = 3
    row_pass: bool = True
    program: str = "forward"

    def __str__(self) -> str:
        pass_off = "" if self.row_pass else ".no_row_pass"
        return f"{self.model}.{self.program}.{self.dtype}.{self.layers}.sm{self.arch}{pass_off}"


MODELS = ("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", "Llama-3.1-8B", "SmolLM2-135M")
CASES = (
    *(Case(name, row_pass=whole) for name in MODELS for whole in (True, False)),
    Case("Qwen3-4B", layers=36),
    *(Case("Qwen3-4B", arch) for arch in CARDS if arch != "90a"),
    *(Case("SmolLM2-135M", arch) for arch in CARDS if arch != "90a"),
    *(Case("Qwen3-4B", arch, "f16") for arch in ("90a", "89")),
    *(Case("Qwen3-4B", arch, "f32") for arch in ("90a", "89")),
    *(Case("Qwen3-4B", program=name) for name in ("sampler", "prompt_logprobs", "hidden_states")),
)


def recorded(case: Case) -> Program:
    made = model(case.model, case.layers)
    formats = Formats(case.dtype, case.dtype, case.dtype)
    weights = dict.fromkeys(made.weights, case.dtype)
    if case.program == "forward":
        groups = made.groups(16, formats)
        sizes = Sizes(groups, (64,) * len(groups), LENGTH)
        return made.forward(weights, sizes, formats).on_one_rank()
    if case.program == "sampler":
        return sampler(made.vocab_size, made.vocab_size, SLOTS, LENGTH + 1, 20)
    head = made.head(weights, case.dtype)
    return (
        prompt_logprobs(head, head.vocab_size, 20)
        if case.program == "prompt_logprobs"
        else hidden_states(head)
    )


def executor(case: Case, ctx: CudaContext) -> CudaExecutor:
    made, program = model(case.model, case.layers), recorded(case)
    states = {t.name: DeviceTensor.empty(t.sizes({}), t.dtype, t.name) for t in program.tensors(Kind.STATE)}
    backend = CudaBackend(
        ctx, made.tensors(LENGTH), CudaOptions(graphs=False, row_pass=case.row_pass), Dummy()
    )
    largest = {"T": TOKENS, "R": SLOTS, "L": SLOTS, "J": 8, "E": 8, "U": 1, "O": 8}
    return backend.prepare(program, states, largest)


def steps(case: Case) -> Iterator[tuple[dict[str, int], bool]]:
    """Sizes, and whether each row is one token."""
    rest = dict.fromkeys("JEUO", 8)
    if case.program != "forward":
        for n in (1, 8, 64, 256):
            yield {"T": TOKENS, "R": n, "L": n, **rest}, False
        return
    few = case.layers > 3
    for n in (1, 2, 8, 16, 17, 64, 128, 160, 256) if few else DECODES:
        yield {"T": n, "R": n, "L": n, **rest}, True
    for tokens, rows in PREFILLS:
        if not few or tokens in (1, 5, 64, 128, 512):
            yield {"T": tokens, "R": rows, "L": rows, **rest}, False


class Addresses:
    """Device addresses by the order in which a step's launches first name them."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def name(self, value: int) -> str:
        return f"@{self._known.setdefault(value, len(self._known))}" if value >> 40 else f"{value:x}"

    def words(self, data: bytes) -> str:
        """Eight bytes at a time; what is no address as it stands."""
        padded = data + bytes(-len(data) % 8)
        words = (padded[i : i + 8] for i in range(0, len(padded), 8))
        return " ".join(self.name(int.from_bytes(word, "little")) for word in words)


def lines(work: list[Any], *, arguments: bool) -> Iterator[str]:
    addresses = Addresses()
    for w in work:
        if not isinstance(w, Launch):
            yield str(w)
            continue
        config = w._config
        flags = " ".join(
            sorted(a.id.name.removeprefix("CU_LAUNCH_ATTRIBUTE_") for a in config.attrs)
            + [f"{a.value.clusterDim.x}" for a in config.attrs if "CLUSTER" in a.id.name]
        )
        held = [
            bytes(h.data) if hasattr(h, "data") else
            ctypes.string_at(h.address, 128) if hasattr(h, "address") else bytes(h)
            for h in w._held
        ]  # fmt: skip
        sizes = ",".join(str(len(h)) for h in held)
        text = f"{w.kernel.name} {w.grid} {w.block} {w.shared} [{sizes}] {flags}"
        yield text + (" | " + " | ".join(map(addresses.words, held)) if arguments else "")


def lists(case: Case, *, arguments: bool = False) -> Iterator[str]:
    """Every step's list, each under a line of its sizes; lines that repeat are counted."""
    with tempfile.TemporaryDirectory() as folder, fake_cuda(FakeCuda(memory=1 << 40, **CARDS[case.arch])):
        ctx = CudaContext(kernels=fake_kernels(Path(folder), case.arch))
        ctx.__dict__["lt"] = FakeLt()
        made = executor(case, ctx)
        for env, decode in steps(case):
            made.capture(env, decode, graph=False)
            yield f"== {env}{' decode' if decode else ''}"
            yield from lines(made.launches(env, decode), arguments=arguments)
            made._captured._steps[decode].clear()
            made._captured._nearest.clear()


def main(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if names and not any(n in str(case) for n in names):
            continue
        for arguments in (False, True):
            path = folder / f"{case}.{'arguments' if arguments else 'launches'}"
            path.write_text("\n".join(lists(case, arguments=arguments)) + "\n")
        print(path, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

"""The GPU's runner over a driver that computes nothing: what is sent, when, and what comes back."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.app.offline import LLM
from pegainfer.app.sampling_params import SamplingParams as Sampling
from pegainfer.contract.errors import ConfigError, InvariantError
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import BlockCopy, NewSlot, Row, SlotBlocks, StepPlan
from pegainfer.engine.config import SchedulerConfig
from pegainfer.kernels.manifest import KernelsError
from pegainfer.ops.sample import STATUS_NOT_FINITE
from pegainfer.runner.buckets import Bucket
from pegainfer.runner.cuda import CudaRunner
from pegainfer.runtime.cuda.driver import CudaError
from tests.support.fake_cuda import ILLEGAL_ADDRESS, Code, FakeCuda, fake_cuda
from tests.support.fake_kernels import FakeLt, write_kernels
from tests.support.smalltokenizers import bpe_json
from tests.support.tinyqwen3 import TinyQwen3

MODEL = TinyQwen3("gpu", seed=5, dtype="bf16", config={"head_dim": 64})
NO_BINARY = Code(209, "CUDA_ERROR_NO_BINARY_FOR_GPU")
PROMPT = [5, 17, 3, 99, 42]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with fake_cuda() as fake:
        yield fake


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model's folder; kernels are found in another."""
    kernels = write_kernels(tmp_path / "kernels")
    monkeypatch.setattr("pegainfer.kernels.load.folders", lambda: (kernels,))
    monkeypatch.setattr("pegainfer.lower.cuda.context.CublasLt", FakeLt)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL.hf_config()))
    return model


def options(**more: Any) -> EngineConfig:
    return EngineConfig(
        **{"backend": "cuda", "load_format": "dummy", "max_model_len": 64, "kv_cache_memory": 1 << 22, **more}
    )


def built(folder: Path, slots: int = 3, **more: Any) -> CudaRunner:
    runner = build_engine(folder, "m", options(**more), SchedulerConfig(max_slots=slots)).runner
    assert isinstance(runner, CudaRunner)
    return runner


@pytest.fixture
def runner(fake: FakeCuda, folders: Path) -> Iterator[CudaRunner]:
    runner = built(folders)
    for rows in (1, 2):  # A slow machine's start may not have made them ready.
        runner._sizes.make(Bucket(rows, rows, True), at_once=True)
    yield runner
    runner.close()


def new(slot: int, tokens: list[int], sampling: SamplingParams = GREEDY) -> NewSlot:
    return NewSlot(
        slot=slot, seq=slot, tokens=pack_tokens(tokens), num_prompt=len(tokens), sampling=sampling, seed=1
    )


def prefill(slot: int = 0, sampling: SamplingParams = GREEDY, step: int = 1) -> StepPlan:
    blocks = (SlotBlocks(slot, 0, (7, 3)),)
    rows = (Row(slot, 0, len(PROMPT), True),)
    return StepPlan(step=step, news=(new(slot, PROMPT, sampling),), blocks=blocks, rows=rows)


def test_offline_use_needs_no_weights_where_they_are_made_up(fake: FakeCuda, folders: Path) -> None:
    (folders / "tokenizer.json").write_text(bpe_json())
    options = {"device": "cuda", "max_model_len": 64, "kv_cache_memory": 1 << 22}
    with LLM(folders, load_format="dummy", **options) as llm:
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, Sampling(max_tokens=3, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 3
    with pytest.raises(ConfigError, match=r"holds no whole model; .*no \*\.safetensors"):
        LLM(folders, **options)


def words(address: int, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address))


def test_a_new_sequence_reaches_the_device(fake: FakeCuda, runner: CudaRunner) -> None:
    result = runner.sample(runner.forward(prefill(1))).wait()
    state = runner._parts.state
    assert words(state.history.address + 4 * state.history.shape[1], 5) == PROMPT
    count = 2
    assert words(state._changes.address, 3 * count) == [7, 3, 1, 1, 0, 1]  # blocks, slots, places
    assert result.step == 1 and len(result.tokens[0]) == 1 and not result.errors


def test_steps_replay_graphs_and_pad(fake: FakeCuda, runner: CudaRunner) -> None:
    before = fake.graph_launches
    first = runner.sample(runner.forward(prefill()))
    decode = StepPlan(step=2, rows=(Row(0, 5, 1, True, True),))
    second = runner.sample(runner.forward(decode))  # two plans in flight
    assert fake.graph_launches - before == 4  # forward and sampler, twice
    first.wait(), second.wait()
    assert runner._slots.known[0] == 7


def decode(step: int, *places: tuple[int, int], **parts: Any) -> StepPlan:
    """Of slots at positions."""
    return StepPlan(step=step, rows=tuple(Row(s, p, 1, True, True) for s, p in places), **parts)


def uploads(fake: FakeCuda, runner: CudaRunner, plan: StepPlan) -> int:
    before = fake.calls["cuMemcpyHtoDAsync"]
    runner.sample(runner.forward(plan)).wait()
    return fake.calls["cuMemcpyHtoDAsync"] - before


def test_a_batch_that_goes_on_sends_nothing(fake: FakeCuda, runner: CudaRunner) -> None:
    for slot in (0, 1):
        runner.sample(runner.forward(prefill(slot, step=slot + 1))).wait()
    assert uploads(fake, runner, decode(3, (1, 5), (0, 5))) == 2  # rows, sampling
    assert words(runner._parts.state.batch.address, 7) == [2, 1, 5, 0, 0, 5, 1]
    assert uploads(fake, runner, decode(4, (1, 6), (0, 6), repeats=True)) == 0
    assert uploads(fake, runner, decode(5, (1, 7), (0, 7), repeats=True)) == 0
    more = (SlotBlocks(1, 0, (9,)),)
    repeated = decode(6, (1, 8), (0, 8), blocks=more, repeats=True)
    assert uploads(fake, runner, repeated) == 1  # the table alone
    assert runner._slots.tables[0][1, :3].tolist() == [7, 3, 9]
    assert uploads(fake, runner, decode(7, (0, 9), (1, 9))) == 2  # in another order
    assert uploads(fake, runner, decode(8, (0, 10))) == 2
    assert runner._slots.known[:2].tolist() == [12, 11]


def test_a_plan_that_repeats_is_one_graph(fake: FakeCuda, runner: CudaRunner) -> None:
    runner.sample(runner.forward(prefill())).wait()
    runner.sample(runner.forward(decode(2, (0, 5), repeats=True))).wait()  # after another plan: as it stands
    runner.sample(runner.forward(decode(3, (0, 6), repeats=True))).wait()
    graphs, copies = fake.graph_launches, fake.calls["cuMemcpyDtoHAsync"]
    assert uploads(fake, runner, decode(4, (0, 7), repeats=True)) == 0
    assert (fake.graph_launches - graphs, fake.calls["cuMemcpyDtoHAsync"] - copies) == (1, 0)
    runner._end_repeats()
    assert runner._slots.known[0] == 9
    runner.sample(runner.forward(decode(5, (0, 8), repeats=True))).wait()  # forgotten: as it stands
    runner.sample(runner.forward(decode(6, (0, 9), repeats=True))).wait()
    last = runner._end_repeats()
    assert last is not None and last.starts.tolist() == [9] and runner._slots.known[0] == 11
    assert last.env == {"T": 1, "R": 1, "L": 1, "C": 10, "Q": 10}
    runner.sample(runner.forward(decode(7, (0, 10)))).wait()
    handle = runner.forward(decode(8, (0, 11), repeats=True))
    with pytest.raises(InvariantError, match="has masks"):
        runner.sample(handle, {0: b""})


def test_a_repeated_step_reads_what_its_graph_wrote(fake: FakeCuda, runner: CudaRunner) -> None:
    for slot in (0, 1):
        runner.sample(runner.forward(prefill(slot, step=slot + 1))).wait()
    runner.sample(runner.forward(decode(3, (0, 5), (1, 5)))).wait()
    address, _, width = runner._drawn.place
    for step, status in ((4, 0), (5, STATUS_NOT_FINITE)):
        pending = runner.sample(runner.forward(decode(step, (0, 2 + step), (1, 2 + step), repeats=True)))
        ring = (ctypes.c_int32 * (2 * width)).from_address(address + 8 * width * (step - 4))
        ring[0], ring[1], ring[width + 1] = 70 + step, 80 + step, status
        result = pending.wait()
        assert (result.step, result.seconds) == (step, 1e-3)
        assert result.tokens == ((70 + step,), () if status else (80 + step,))
        assert list(result.errors) == [1] * (status != 0)


def test_log_probabilities_of_repeated_steps_are_fetched(fake: FakeCuda, runner: CudaRunner) -> None:
    runner.sample(runner.forward(prefill(0, SamplingParams(temperature=0.0, logprobs=2)))).wait()
    runner.sample(runner.forward(decode(2, (0, 5)))).wait()
    for step in (3, 4):
        graphs = fake.graph_launches
        handle = runner.forward(decode(step, (0, 3 + step), repeats=True))
        assert handle.rows.starts.tolist() == [3 + step]
        before = fake.calls["cuMemcpyHtoDAsync"]
        pending = runner.sample(handle)
        assert fake.calls["cuMemcpyHtoDAsync"] == before and fake.graph_launches == graphs + 2
        assert "top_ids" in pending._step.results.arrays(1)
        pending.wait()
    assert runner._slots.known[0] == 9


def test_a_repeated_plan_with_biases_is_drawn_on_its_own(fake: FakeCuda, runner: CudaRunner) -> None:
    runner.sample(runner.forward(prefill(0, SamplingParams(logit_bias=((3, 1.0),))))).wait()
    for step in (2, 3, 4):
        graphs = fake.graph_launches
        runner.sample(runner.forward(decode(step, (0, 3 + step), repeats=True))).wait()
        assert fake.graph_launches == graphs + 1  # the sampler's sizes have no graph


def test_sizes_made_ready_late_touch_no_batch(
    fake: FakeCuda, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pegainfer.app.gpu.CAPTURE_SECONDS", 0.0)
    runner = built(folders)
    state, forward = runner._parts.state, runner._parts.forward
    capture = forward.capture
    seen: list[tuple[bool, int]] = []  # of each capture, which runs once: decoding, rows in the batch

    def watched(env: dict[str, int], decode_only: bool, **more: Any) -> None:
        seen.append((decode_only, words(state.batch.address, 1)[0]))
        capture(env, decode_only, **more)

    monkeypatch.setattr(forward, "capture", watched)
    for slot in (0, 1):
        runner.sample(runner.forward(prefill(slot, step=slot + 1))).wait()
    runner.sample(runner.forward(decode(3, (1, 5), (0, 5)))).wait()
    assert seen == [(False, 0), (True, 0)]
    assert words(state.batch.address, 7) == [2, 1, 5, 0, 0, 5, 1]
    runner.sample(runner.forward(decode(4, (0, 6)))).wait()
    assert seen[2:] == [(True, 0)]
    while runner.prepare():
        pass
    assert len(seen) == len(set(runner._sizes.buckets.all())) == len(runner._sizes)
    assert all(rows == 0 for decoding, rows in seen if decoding)
    assert not runner.prepare()
    runner.close()


def test_a_step_says_how_long_its_graph_took(
    fake: FakeCuda, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pegainfer.app.gpu.CAPTURE_SECONDS", 0.0)
    runner = built(folders)

    def cold(plan: StepPlan) -> float:
        begin = time.perf_counter()
        result = runner.sample(runner.forward(plan)).wait()
        assert 0.0 <= result.cold_seconds <= time.perf_counter() - begin
        return result.cold_seconds

    assert cold(prefill(0, step=1)) > 0.0
    assert cold(decode(2, (0, 5))) > 0.0
    assert cold(decode(3, (0, 6))) == 0.0
    while runner.prepare():  # beside the steps
        pass
    assert runner._stream.cold_seconds > 0.0
    cold(decode(4, (0, 7), repeats=True))
    assert cold(decode(5, (0, 8), repeats=True)) > 0.0  # the graph with the sampling in it
    assert cold(decode(6, (0, 9), repeats=True)) == 0.0
    runner.close()


def test_idle_seconds_make_no_graphs(fake: FakeCuda, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds megabytes of the host's memory; most of the sizes never come."""
    monkeypatch.setattr("pegainfer.app.gpu.CAPTURE_SECONDS", 0.0)
    runner = built(folders)
    while runner.prepare():
        pass
    steps = [s for kind in runner._parts.forward._captured._steps.values() for s in kind]
    assert len(steps) == len(runner._sizes) and not any(s.graph for s in steps)
    graphs = fake.calls["cuGraphInstantiate"]
    runner.sample(runner.forward(prefill())).wait()
    assert fake.calls["cuGraphInstantiate"] == graphs + 1
    runner.sample(runner.forward(prefill(1, step=2))).wait()
    assert fake.calls["cuGraphInstantiate"] == graphs + 1
    assert [s.env["T"] for s in steps if s.graph] == [16]
    runner.close()


def test_a_closed_runner_holds_nothing_of_the_device(fake: FakeCuda, folders: Path) -> None:
    """Whoever still has the runner: cuBLASLt keeps the context alive, and what nobody frees in it."""
    runner = built(folders)
    runner.sample(runner.forward(prefill())).wait()
    assert fake.used > 1 << 22  # the cache alone
    runner.close()
    assert fake.used == 0
    runner.close()


def test_what_is_ready_at_the_start_has_its_graphs(fake: FakeCuda, folders: Path) -> None:
    runner = built(folders)
    steps = [s for kind in runner._parts.forward._captured._steps.values() for s in kind]
    assert steps and all(s.graph for s in steps)
    runner.close()


def test_what_needs_the_host_is_sent_again(fake: FakeCuda, runner: CudaRunner) -> None:
    biased = SamplingParams(temperature=0.0, logit_bias=((3, 1.0),))
    runner.sample(runner.forward(prefill(0))).wait()
    assert uploads(fake, runner, decode(2, (0, 5))) == 2
    assert uploads(fake, runner, decode(3, (0, 6), repeats=True)) == 0
    # A mask is of one step: the step after sends the sampler's inputs anew.
    handle = runner.forward(decode(4, (0, 7)))
    before = fake.calls["cuMemcpyHtoDAsync"]
    runner.sample(handle, {0: b"\xff" * (4 * -(-runner.info.vocab_size // 32))}).wait()
    assert fake.calls["cuMemcpyHtoDAsync"] == before + 1
    assert uploads(fake, runner, decode(5, (0, 8), repeats=True)) == 1
    # Another sequence in the same slot.
    other = StepPlan(
        step=6, frees=(0,), news=(new(0, [*PROMPT] * 2, biased),), blocks=(SlotBlocks(0, 0, (7,)),),
        rows=(Row(0, 9, 1, True),),
    )  # fmt: skip
    assert uploads(fake, runner, other) >= 3
    # The host stages biases at every step.
    assert uploads(fake, runner, decode(7, (0, 10), repeats=True)) == 1


def test_without_graphs_launches_are_lists(fake: FakeCuda, folders: Path) -> None:
    runner = built(folders, cuda_graph=False)
    runner.sample(runner.forward(prefill())).wait()
    assert fake.graph_launches == 0
    runner.close()


@pytest.mark.parametrize(("pooling", "want"), [("mean", (3 * 3.0 + 2 * 1.5) / 5), ("last", 1.5)])
def test_a_prompts_vector_comes_back(fake: FakeCuda, runner: CudaRunner, pooling: Any, want: float) -> None:
    asks = SamplingParams(temperature=0.0, max_tokens=1, pooling=pooling)
    hidden = runner._parts.hidden_states.outputs({"T": 1, "L": 3})["hidden"]
    assert hidden.dtype == "bf16" and hidden.shape == (3, MODEL.hf_config()["hidden_size"])
    bits = np.ctypeslib.as_array((ctypes.c_uint16 * prod(hidden.shape)).from_address(hidden.address))
    plan = prefill(0, asks)
    bits[:] = 0x4040  # what a kernel would have left: 3.0
    first = runner.sample(runner.forward(msgspec.structs.replace(plan, rows=(Row(0, 0, 3, False),))))
    bits[:] = 0x3FC0  # 1.5
    second = runner.sample(runner.forward(StepPlan(step=2, rows=(Row(0, 3, 2, True),))))
    bits[:] = 0
    assert first.wait().pooled == {}
    ((row, vector),) = second.wait().pooled.items()
    assert row == 0
    assert np.frombuffer(vector, "<f4").tolist() == pytest.approx([want] * hidden.shape[1])
    assert second.wait().pooled == {0: vector}  # as often as it is asked
    # A prompt of one token is a step like those that decode.
    bits[:] = 0x4040
    new_slot = NewSlot(slot=1, seq=9, tokens=pack_tokens([4]), num_prompt=1, sampling=asks, seed=1)
    rows = (Row(1, 0, 1, True),)
    single = StepPlan(step=3, frees=(0,), news=(new_slot,), blocks=(SlotBlocks(1, 0, (2,)),), rows=rows)
    result = runner.sample(runner.forward(single)).wait()
    assert np.frombuffer(result.pooled[0], "<f4").tolist() == [3.0] * hidden.shape[1]


def test_a_step_is_sampled_before_the_next(runner: CudaRunner) -> None:
    first = runner.forward(prefill())
    runner.forward(prefill(1, step=2))
    with pytest.raises(InvariantError, match="overwritten"):
        runner.sample(first)


def test_logprobs_come_back_where_asked(runner: CudaRunner) -> None:
    asks = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2)
    handle = runner.forward(prefill(0, asks))
    pending = runner.sample(handle)
    assert "top_ids" in pending._step.results.arrays(1)
    assert [i for p in pending._parts for i in p.asked.targets.tolist()] == PROMPT[1:]
    assert pending.wait() is pending.wait()


def test_logprobs_of_prompts_reuse_no_event_that_still_times_a_step(runner: CudaRunner) -> None:
    """A step's time may begin at the end event of the one before, whose buffer has been given back."""
    asks = SamplingParams(temperature=0.0, prompt_logprobs=2)
    held = []
    for i, sampling in enumerate((asks, GREEDY, GREEDY, GREEDY)):
        plan = msgspec.structs.replace(prefill(0, sampling, step=i + 1), frees=(0,) if i else ())
        pending = runner.sample(runner.forward(plan))
        pending.wait()
        held.append(pending._step.results.ended)
    assert len(set(map(id, held))) == 4


def test_blocks_are_copied_on_the_device(runner: CudaRunner) -> None:
    pool = runner._parts.pools.states["kv"]
    nbytes = pool.nbytes // pool.shape[0]
    ctypes.memset(pool.address + 4 * nbytes, 9, nbytes)
    runner.sample(runner.forward(StepPlan(step=1, copies=(BlockCopy(0, 4, 6),)))).wait()
    assert np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pool.address + 6 * nbytes)).min() == 9


def test_a_failure_names_the_step(fake: FakeCuda, runner: CudaRunner) -> None:
    pending = runner.sample(runner.forward(prefill()))
    fake.fail["cuEventSynchronize"] = ILLEGAL_ADDRESS
    with pytest.raises(CudaError, match=r"cuEventSynchronize failed.*step 1, sizes .*'T': 5"):
        pending.wait()
    fake.fail.clear()


def test_a_launch_that_fails_names_call_op_sizes_and_step(fake: FakeCuda, folders: Path) -> None:
    runner = built(folders, cuda_graph=False)
    runner.sample(runner.forward(prefill())).wait()
    fake.broken = "attention_prefill"
    with pytest.raises(
        CudaError,
        match=r"^step 2: .*cuLaunchKernelEx failed; got CUDA_ERROR_ILLEGAL_ADDRESS.*; at attention T=\d+ H=4 "
        r".*: attention_prefill\w* grid .*; remedy: find the op: pegainfer doctor .*--bisect$",
    ):
        runner.forward(prefill(1, step=2))
    fake.broken = None
    runner.close()


@pytest.mark.parametrize(
    ("gpu", "error", "words"),
    [
        (FakeCuda(devices=0), CudaError, "no usable NVIDIA GPU; .* remedy: check CUDA_VISIBLE_DEVICES"),
        (FakeCuda(version=12080), CudaError, "driver is too old; .* remedy: install NVIDIA driver 580"),
        (FakeCuda(capability=(7, 5)), CudaError, r"compute capability 7\.5; .* remedy: use one of these"),
        (FakeCuda(capability=(8, 9)), KernelsError, r"no kernels were built for Fake GPU \(sm_89\); .*"
         "remedy: run: pegainfer kernels build --arch 89"),
        (FakeCuda(fail={"cuModuleLoadData": NO_BINARY}), CudaError, "cubin; remedy: run: pegainfer kernels"),
    ],
)  # fmt: skip
def test_a_gpu_that_cannot_serve_says_so_in_one_line(
    gpu: FakeCuda, error: type[Exception], words: str, folders: Path
) -> None:
    with fake_cuda(gpu), pytest.raises(error, match=words) as e:
        built(folders)
    assert "\n" not in str(e.value)


def test_all_that_fits_becomes_cache(fake: FakeCuda, folders: Path) -> None:
    runner = built(folders, kv_cache_memory=None)
    info = runner.info
    assert fake.used <= 0.9 * fake.memory
    assert info.num_blocks[0] == 1 << 17 or info.num_blocks[0] * info.kv.groups[0].bytes_per_block > 1 << 32
    runner.close()


def test_a_length_nobody_asked_for_is_lowered(fake: FakeCuda, folders: Path) -> None:
    block = built(folders).info.kv.groups[0].bytes_per_block  # type: ignore[union-attr]
    runner = built(folders, max_model_len=None, kv_cache_memory=5 * block)
    assert (runner.info.num_blocks, runner.info.max_model_len) == ((5,), 80)
    with pytest.raises(ConfigError, match="one sequence of max_model_len"):
        built(folders, max_model_len=96, kv_cache_memory=5 * block)


def test_too_little_memory_is_told_before_anything_is_loaded(folders: Path) -> None:
    with fake_cuda(FakeCuda(memory=1 << 30)), pytest.raises(ConfigError, match="--max-model-len"):
        built(folders, kv_cache_memory=None)

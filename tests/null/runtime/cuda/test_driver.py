"""The layer over the CUDA driver without one: what users read when there is no GPU, how calls are checked."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from pegainfer.runtime.cuda import driver
from pegainfer.runtime.cuda.device import Device
from pegainfer.runtime.cuda.driver import CudaError, call, errors_at, probe
from pegainfer.runtime.cuda.graph import Graph
from pegainfer.runtime.cuda.memory import DeviceBuffer
from pegainfer.runtime.cuda.module import Module
from pegainfer.runtime.cuda.stream import Event, Stream
from tests.support.fake_cuda import ILLEGAL_ADDRESS, Code, FakeCuda, fake_cuda


@pytest.fixture(autouse=True)
def forgotten() -> None:
    driver.bindings.cache_clear()


def test_without_the_package_the_remedy_is_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    text = probe()
    assert text is not None and text.startswith(
        "the CUDA bindings are not installed; expected cuda-bindings 13"
    )
    assert text.endswith("remedy: where there is an NVIDIA GPU: pip install 'pegainfer[cuda]'")
    assert "\n" not in text


def test_without_a_driver_the_loaders_words_are_kept_to_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoDriver(ModuleType):
        def cuInit(self, flags: int) -> None:
            raise RuntimeError('"cuda" can only be found via system search. Ensure that\nthe driver is there')

    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", NoDriver("cuda.bindings.driver"))
    assert probe() == (
        'no NVIDIA driver; expected libcuda.so.1; got "cuda" can only be found via system search; '
        "remedy: install NVIDIA driver 580 or newer"
    )


def test_no_gpu_an_old_driver_and_a_working_one() -> None:
    with fake_cuda(FakeCuda(devices=0)):
        assert probe() == (
            "no usable NVIDIA GPU; got CUDA_ERROR_NO_DEVICE; "
            "remedy: check CUDA_VISIBLE_DEVICES and that nvidia-smi lists a GPU"
        )
    with fake_cuda(FakeCuda(version=12080)):
        text = probe()
        assert text is not None and "too old; expected CUDA 13000; got CUDA 12080; remedy: install" in text
    with fake_cuda():
        assert probe() is None


def test_a_failed_call_names_itself_its_result_and_its_purpose() -> None:
    with fake_cuda(FakeCuda(fail={"cuStreamSynchronize": ILLEGAL_ADDRESS})):
        stream = Stream()
        with pytest.raises(CudaError) as e, errors_at("step 7"):
            stream.synchronize("linear T=1")
    assert e.value.code == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert str(e.value).startswith(
        "step 7: cuStreamSynchronize failed; got CUDA_ERROR_ILLEGAL_ADDRESS: illegal"
    )
    assert "at linear T=1" in str(e.value)


def test_values_come_without_the_result_code() -> None:
    with fake_cuda():
        assert call("cuDeviceGetCount") == 1
        assert call("cuMemGetInfo") == (1 << 34, 1 << 34)
        assert call("cuCtxSynchronize") is None


def test_ordinals_are_checked() -> None:
    with fake_cuda():
        info = Device.open(0).info
        assert (info.name, info.arch, info.num_sms, info.pdl) == ("Fake GPU", "90a", 132, True)
        with pytest.raises(CudaError, match=r"no GPU with ordinal 1; expected 0 … 0; .*--device-ordinal"):
            Device.open(1)


def test_an_event_that_has_not_ended_is_no_error() -> None:
    not_ready = Code(600, "CUDA_ERROR_NOT_READY")
    with fake_cuda(FakeCuda(fail={"cuEventQuery": not_ready})):
        assert not Event().done()
    with fake_cuda(FakeCuda(fail={"cuEventQuery": ILLEGAL_ADDRESS})), pytest.raises(CudaError):
        Event().done()


def test_memory_is_given_back_and_its_lack_has_figures() -> None:
    with fake_cuda(FakeCuda(memory=4 << 20)) as fake:
        buffer = DeviceBuffer(3 << 20, "weights")
        with pytest.raises(CudaError) as e:
            DeviceBuffer(2 << 20, "KV cache")
        assert "too little GPU memory for KV cache; expected 2 MiB free; got 1 of 4 MiB" in str(e.value)
        buffer.free()
        buffer.free()
        assert fake.used == 0 and DeviceBuffer(0, "nothing").address == 0


def test_shared_memory_is_opted_in_to_once_and_within_the_device() -> None:
    with fake_cuda():
        kernel = Module(b"", Device.open(0), "test.cubin").kernel("k")
        kernel.allow_shared(200 << 10)
        with pytest.raises(
            CudaError, match=r"kernel k needs more shared memory .* got 233472 bytes \(1024 too many\)"
        ):
            kernel.allow_shared(228 << 10)


def test_a_capture_that_fails_leaves_the_stream_usable() -> None:
    with fake_cuda() as fake:
        stream = Stream()

        def broken() -> None:
            raise ValueError("in the middle")

        with pytest.raises(ValueError, match="in the middle"):
            Graph(stream, broken, "broken")
        assert not fake.capturing
        with pytest.raises(CudaError, match="a graph without work was captured; at empty"):
            Graph(stream, lambda: None, "empty")

"""The one door to the CUDA driver: lazy import, one check for every call, errors that name the work."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from pegainfer.contract.errors import PegaError

MIN_DRIVER = 13000  # CUDA 13.0 (driver 580): what the cubins' compiler and the bindings speak
_INSTALL = "where there is an NVIDIA GPU: pip install 'pegainfer[cuda]'"
_UPDATE = "install NVIDIA driver 580 or newer"


class CudaError(PegaError):
    """The GPU, its driver or a kernel failed. `code` is the driver's result name, '' where there is none."""

    def __init__(self, what: str, *, code: str = "", **parts: Any) -> None:
        self.code = code
        super().__init__(what, **parts)


@cache
def bindings() -> ModuleType:
    """`cuda.bindings.driver`. Raises CudaError in one line where the package or the driver is missing."""
    try:
        driver = import_module("cuda.bindings.driver")
    except ImportError as e:
        raise CudaError(
            "the CUDA bindings are not installed", expected="cuda-bindings 13", got=e, remedy=_INSTALL
        ) from None
    try:
        result = driver.cuInit(0)
    except Exception as e:  # no libcuda: the bindings raise whatever their loader found
        raise CudaError(
            "no NVIDIA driver", expected="libcuda.so.1", got=str(e).split(".")[0], remedy=_UPDATE
        ) from None
    if result[0]:
        raise CudaError("no usable NVIDIA GPU", got=result_text(result[0]), remedy=_remedy(result[0]))
    version = driver.cuDriverGetVersion()[1]
    if version < MIN_DRIVER:
        raise CudaError(
            "the NVIDIA driver is too old", expected=f"CUDA {MIN_DRIVER}", got=f"CUDA {version}",
            remedy=_UPDATE,
        )  # fmt: skip
    return driver


def probe() -> str | None:
    """None where a GPU can be used, else why not, in one line. Never raises."""
    try:
        count = call("cuDeviceGetCount")
    except PegaError as e:
        return str(e)
    except Exception as e:  # a broken installation must not break what only asks
        return f"CUDA probe failed; got {type(e).__name__}: {e}"
    return None if count else "no NVIDIA GPU is visible; remedy: check CUDA_VISIBLE_DEVICES"


def call(name: str, *args: Any, where: object = None) -> Any:
    """Calls a driver function, checks its result, returns its value (a tuple if it has several).

    Args:
        where: what the call was for (op, shapes), shown in the error.
    """
    result = getattr(bindings(), name)(*args)
    if result[0]:
        fail(name, result[0], where)
    if len(result) == 2:
        return result[1]
    return result[1:] if len(result) > 2 else None


def fail(name: str, code: Any, where: object = None) -> None:
    """Raises CudaError for a failed call."""
    raise CudaError(
        f"{name} failed", code=getattr(code, "name", str(code)), got=result_text(code), where=where,
        remedy=_remedy(code),
    )  # fmt: skip


def result_text(code: Any) -> str:
    """'CUDA_ERROR_OUT_OF_MEMORY: out of memory'."""
    try:
        _, text = bindings().cuGetErrorString(code)
        detail = f": {text.decode()}" if text else ""
    except Exception:  # the driver itself is what failed
        detail = ""
    return f"{getattr(code, 'name', code)}{detail}"


class errors_at:
    """Adds a place (a step, a phase) to CUDA errors raised inside: `with errors_at("step 3"):`.

    A class, not a generator: every step enters it several times, at a fifth of the cost.
    """

    __slots__ = ("_where",)

    def __init__(self, *where: object) -> None:
        """`where`: put together only if something is raised."""
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CudaError):
            place = " ".join(map(str, self._where))
            raise CudaError(f"{place}: {error}", code=error.code) from error


def _remedy(code: Any) -> str | None:
    return {
        "CUDA_ERROR_OUT_OF_MEMORY": "lower --gpu-memory-utilization or --max-model-len, or free the GPU",
        "CUDA_ERROR_NO_DEVICE": "check CUDA_VISIBLE_DEVICES and that nvidia-smi lists a GPU",
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "restart after the driver's update",
        "CUDA_ERROR_NO_BINARY_FOR_GPU": "run: pegainfer kernels build --arch <this GPU's>",
        "CUDA_ERROR_ILLEGAL_ADDRESS": "find the op: pegainfer doctor MODEL --device cuda --bisect",
    }.get(getattr(code, "name", ""))

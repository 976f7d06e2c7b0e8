"""What the routing kernel refuses, on a driver without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegainfer.contract.errors import UnsupportedError
from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.ops.compose import one_call
from pegainfer.ops.moe import ROUTE_EXPERTS
from tests.support.fake_cuda import FakeCuda, fake_cuda, fake_kernels

ATTRS = {"sigmoid": False, "renormalize": True, "groups": 1, "kept_groups": 1, "scale": 1.0}


@pytest.mark.parametrize(
    ("sizes", "attrs", "message"),
    [
        ({"N": 64, "K": 33}, {}, "experts of a token; expected at most 32; got 33"),
        ({"N": 1025, "K": 8}, {}, "experts; expected at most 1024; got 1025"),
        ({"N": 64, "K": 8}, {"groups": 7, "kept_groups": 1}, "groups; expected divisors of 64"),
    ],
)
def test_routing_beyond_the_kernel_is_refused(
    sizes: dict[str, int], attrs: dict[str, int], message: str, tmp_path: Path
) -> None:
    sizes = {"T": 4, **sizes}
    dtypes = {o.name: o.dtypes[0] for o in ROUTE_EXPERTS.operands}
    program = one_call(ROUTE_EXPERTS, sizes, dtypes, ATTRS | attrs)
    with fake_cuda(FakeCuda()):
        backend = CudaBackend(CudaContext(kernels=fake_kernels(tmp_path)), {}, CudaOptions(graphs=False))
        with pytest.raises(UnsupportedError, match=message):
            backend.prepare(program, {}, sizes)

"""Every test here needs one CUDA device; without one it is skipped and says why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pegainfer.lower.cuda.context import CudaContext
from pegainfer.runtime.cuda.driver import probe


@pytest.fixture(scope="session")
def ctx() -> Iterator[CudaContext]:
    """One GPU with its kernels, for all tests of the session."""
    reason = probe()
    if reason is not None:
        pytest.skip(reason)
    context = CudaContext()
    yield context
    context.close()

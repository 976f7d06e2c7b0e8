"""A model's weights on the GPU, and programs made ready to run on them."""

from __future__ import annotations

from collections.abc import Mapping

from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.store import Dummy, WeightStore
from pegainfer.ops.program import Program
from pegainfer.ops.tensor import Sizes
from pegainfer.runtime.cuda.tensor import DeviceTensor
from pegainfer.runtime.cuda.upload import Progress
from pegainfer.runtime.weights.weight import Weight


class CudaBackend:
    """The GPU's side of ops.backend.Backend: states, bound inputs and outputs are device tensors.

    Its executors share weights, and run in order on the context's stream.

    Args:
        weights: every constant of the programs to come, by name.
        dummy: generates the weights that are missing or have no parts.
    """

    def __init__(
        self,
        ctx: CudaContext,
        weights: Mapping[str, Weight],
        options: CudaOptions | None = None,
        dummy: Dummy | None = None,
    ) -> None:
        self.ctx = ctx
        self.options = options or CudaOptions()
        self.store = WeightStore(ctx, weights, dummy)

    def prepare(
        self,
        program: Program,
        states: Mapping[str, DeviceTensor],
        largest: Sizes,
        bound: Mapping[str, DeviceTensor] | None = None,
    ) -> CudaExecutor:
        """Makes a program ready. Memory for its weights is taken now, `load` fills it.

        Args:
            largest: the greatest value of each symbolic size that a buffer or output has.
            bound: inputs that are device memory already, such as another program's outputs; and outputs that
                are, because another program has the same ones.

        Raises UnsupportedError or OpError where the program does not fit these kernels or weights, CudaError
        where memory is short.
        """
        return CudaExecutor(program, self.store, states, largest, self.options, ctx=self.ctx, bound=bound)

    def load(self, progress: Progress | None = None) -> None:
        """Loads the weights of all prepared programs to the device."""
        self.store.load(progress)

    def describe(self) -> str:
        """One line for `doctor` and logs."""
        return self.ctx.describe()

    def close(self) -> None:
        """Waits for the device; executors must not run afterwards."""
        self.ctx.close()

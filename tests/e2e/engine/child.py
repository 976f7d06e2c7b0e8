"""An engine process on the null device: python -m tests.e2e.engine.child SOCKET STEP_SECONDS"""

from __future__ import annotations

import sys

from pegainfer.contract.handle import EngineInfo
from pegainfer.engine.null import NullConfig, NullRunner
from pegainfer.engine.process import serve_engine


def build(step_seconds: float) -> tuple[NullRunner, EngineInfo]:
    runner = NullRunner(NullConfig(step_seconds=step_seconds))
    info = EngineInfo(
        model="null",
        architecture="NullModel",
        device="null",
        vocab_size=runner.info.vocab_size,
        max_model_len=runner.info.max_model_len,
        block_size=16,
        num_blocks=runner.info.num_blocks[0],
        max_slots=runner.info.max_slots,
    )
    return runner, info


if __name__ == "__main__":
    sys.exit(serve_engine(lambda: build(float(sys.argv[2])), sys.argv[1], connect_seconds=60.0))

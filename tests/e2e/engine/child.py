"""An engine process on the null device: python -m tests.e2e.engine.child SOCKET STEP_SECONDS"""

from __future__ import annotations

import sys

from pegainfer.contract.handle import EngineInfo
from pegainfer.engine.process import serve_engine
from pegainfer.null.config import NullConfig
from pegainfer.null.runner import NullRunner
from tests.support.null_engine import null_info


def build(step_seconds: float) -> tuple[NullRunner, EngineInfo]:
    runner = NullRunner(NullConfig(step_seconds=step_seconds))
    return runner, null_info(runner)


if __name__ == "__main__":
    sys.exit(serve_engine(lambda: build(float(sys.argv[2])), sys.argv[1], connect_seconds=60.0))

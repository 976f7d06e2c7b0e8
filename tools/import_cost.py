"""Prints what `import pegainfer` costs in a fresh interpreter; exits with 1 where it is over the bar."""

from __future__ import annotations

import subprocess
import sys

BAR = 0.25  # seconds
RUNS = 5
PROBE = "import time; t = time.perf_counter(); import pegainfer; print(time.perf_counter() - t)"


def main() -> int:
    runs = [
        subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True) for _ in range(RUNS)
    ]
    best = min(float(run.stdout) for run in runs)
    print(f"import pegainfer: {1e3 * best:.1f} ms, best of {RUNS} (bar: {1e3 * BAR:.0f} ms)")
    return int(best > BAR)


if __name__ == "__main__":
    sys.exit(main())

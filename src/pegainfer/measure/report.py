"""Makes docs/kernels-cpu.md and kernels.md from the ledger: `python -m pegainfer.measure.report [FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path

from pegainfer.measure import report_cpu, report_gpu
from pegainfer.measure.ledger import LEDGER, read

DOCS = Path(__file__).resolve().parents[3] / "docs"  # of a checkout
PAGES = {"kernels-cpu.md": report_cpu.report, "kernels.md": report_gpu.report}


def main(argv: list[str]) -> None:
    folder, rows = Path(argv[0]) if argv else DOCS, read(LEDGER)
    for name, report in PAGES.items():
        (folder / name).write_text(report(rows))
        print(folder / name)


if __name__ == "__main__":
    main(sys.argv[1:])

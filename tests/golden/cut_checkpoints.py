"""Writes tests/data/weights/checkpoints.safetensors: one matrix in the published quantised forms.

Tensors `<form>.<suffix in the checkpoint>` and `<form>.decoded`, float32 [16, 128]. The forms of AWQ and GPTQ
are packed by loops whose words were compared with vLLM 0.33's packing functions; those of compressed-tensors
by its own library, 0.20.1. That took torch and a matrix of 64 rows; this script cuts its first sixteen out of
the file that was made then: python tests/golden/cut_checkpoints.py FORMATS.safetensors
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from pegainfer.runtime.weights.formats import SAFETENSORS_DTYPES
from pegainfer.runtime.weights.safetensors import SafetensorsFile
from tests.support.modelfiles import safetensors_file

OUT = Path(__file__).parents[1] / "data" / "weights" / "checkpoints.safetensors"
FORMS = (
    "awq_gemm", "gptq_v1_sym", "gptq_v1_asym_desc_act", "gptq_v2_asym", "ct_w4a16_sym", "ct_w4a16_asym",
    "ct_w8a8_int8", "ct_nvfp4", "fp8_block", "ct_fp8_dynamic",
)  # fmt: skip
ROWS, KEPT = 64, 16
DTYPES = {form: dtype for dtype, form in SAFETENSORS_DTYPES.items()}


def main(source: str) -> None:
    found = {}
    with SafetensorsFile(source) as file:
        for name, info in file.tensors.items():
            if name.partition(".")[0] not in FORMS or name.endswith("weight_shape"):
                continue
            size = info.nbytes // max(1, int(np.prod(info.shape)))
            a = file.part(name).bytes().reshape(*info.shape, size)
            for axis, count in enumerate(info.shape):
                if count in (ROWS, ROWS // 8) and not (name.endswith("weight_packed") and axis == 1):
                    a = a.take(range(count * KEPT // ROWS), axis=axis)
                    break
            found[name] = DTYPES[info.format], a.shape[:-1], a.tobytes()
    OUT.write_bytes(safetensors_file(found))


if __name__ == "__main__":
    main(sys.argv[1])

"""Storage formats of tensors: how many elements a block has and how many bytes it takes."""

from __future__ import annotations

from typing import NamedTuple


class Format(NamedTuple):
    """`elements` consecutive elements of the innermost axis are stored in `bytes` bytes."""

    name: str
    elements: int
    bytes: int

    def nbytes(self, count: int) -> int:
        """Bytes of `count` elements, which must be a multiple of the block."""
        return count // self.elements * self.bytes


# Names are those of the files, in lower case; plain types are named alike in GGUF and safetensors. The
# quantised ones are ggml's, their sizes those of the block structs in ggml-common.h.
_ALL = (
    Format("f64", 1, 8),
    Format("f32", 1, 4),
    Format("f16", 1, 2),
    Format("bf16", 1, 2),
    Format("i64", 1, 8),
    Format("i32", 1, 4),
    Format("i16", 1, 2),
    Format("i8", 1, 1),
    Format("u64", 1, 8),
    Format("u32", 1, 4),
    Format("u16", 1, 2),
    Format("u8", 1, 1),
    Format("bool", 1, 1),
    Format("c64", 1, 8),
    Format("f8_e4m3", 1, 1),
    Format("f8_e5m2", 1, 1),
    Format("f8_e8m0", 1, 1),
    Format("f6_e2m3", 4, 3),
    Format("f6_e3m2", 4, 3),
    Format("f4", 2, 1),
    Format("q4_0", 32, 18),
    Format("q4_1", 32, 20),
    Format("q5_0", 32, 22),
    Format("q5_1", 32, 24),
    Format("q8_0", 32, 34),
    Format("q8_1", 32, 36),
    Format("q2_k", 256, 84),
    Format("q3_k", 256, 110),
    Format("q4_k", 256, 144),
    Format("q5_k", 256, 176),
    Format("q6_k", 256, 210),
    Format("q8_k", 256, 292),
    Format("iq1_s", 256, 50),
    Format("iq1_m", 256, 56),
    Format("iq2_xxs", 256, 66),
    Format("iq2_xs", 256, 74),
    Format("iq2_s", 256, 82),
    Format("iq3_xxs", 256, 98),
    Format("iq3_s", 256, 110),
    Format("iq4_nl", 32, 18),
    Format("iq4_xs", 256, 136),
    Format("tq1_0", 256, 54),
    Format("tq2_0", 256, 66),
    Format("mxfp4", 32, 17),
    Format("nvfp4", 64, 36),
    Format("q1_0", 128, 18),
    # This project's own forms of quantised checkpoints (grouped.py, fp8.py): a group's word, then its levels.
    Format("int4_g32", 32, 20),
    Format("int4_g64", 64, 36),
    Format("int4_g128", 128, 68),
    Format("int8_g32", 32, 36),
    Format("int8_g64", 64, 68),
    Format("int8_g128", 128, 132),
    Format("fp4_g16", 32, 24),
    Format("fp4_g32", 32, 20),
    Format("fp8_g32", 32, 36),
    Format("fp8_g64", 64, 68),
    Format("fp8_g128", 128, 132),
    Format("fp8_r32", 32, 36),
    Format("fp8_r64", 64, 68),
    Format("fp8_r128", 128, 132),
)
FORMATS = {f.name: f for f in _ALL}

# How NumPy names the formats that it has, little-endian as files store them; it has none for bf16.
NUMPY_NAMES = {
    f.name: f"<{f.name[0]}{f.bytes}"
    for f in _ALL[: _ALL.index(FORMATS["f8_e4m3"])]
    if f.name not in ("bf16", "bool")
}

# ggml_type numbers of GGUF version 3. Gaps are types that ggml removed.
GGML_TYPES = {
    0: "f32",
    1: "f16",
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    9: "q8_1",
    10: "q2_k",
    11: "q3_k",
    12: "q4_k",
    13: "q5_k",
    14: "q6_k",
    15: "q8_k",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    20: "iq4_nl",
    21: "iq3_s",
    22: "iq2_s",
    23: "iq4_xs",
    24: "i8",
    25: "i16",
    26: "i32",
    27: "i64",
    28: "f64",
    29: "iq1_m",
    30: "bf16",
    34: "tq1_0",
    35: "tq2_0",
    39: "mxfp4",
    40: "nvfp4",
    41: "q1_0",
}

SAFETENSORS_DTYPES = {f.name.upper(): f.name for f in _ALL[: _ALL.index(FORMATS["q4_0"])]}

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


# Plain types are named alike in GGUF and safetensors. The quantised ones are ggml's; their sizes follow from
# the block structs of ggml-common.h and are compared with the gguf package in the tests.
_ALL = (
    Format("F64", 1, 8),
    Format("F32", 1, 4),
    Format("F16", 1, 2),
    Format("BF16", 1, 2),
    Format("I64", 1, 8),
    Format("I32", 1, 4),
    Format("I16", 1, 2),
    Format("I8", 1, 1),
    Format("U64", 1, 8),
    Format("U32", 1, 4),
    Format("U16", 1, 2),
    Format("U8", 1, 1),
    Format("BOOL", 1, 1),
    Format("C64", 1, 8),
    Format("F8_E4M3", 1, 1),
    Format("F8_E5M2", 1, 1),
    Format("F8_E8M0", 1, 1),
    Format("F6_E2M3", 4, 3),
    Format("F6_E3M2", 4, 3),
    Format("F4", 2, 1),
    Format("Q4_0", 32, 18),
    Format("Q4_1", 32, 20),
    Format("Q5_0", 32, 22),
    Format("Q5_1", 32, 24),
    Format("Q8_0", 32, 34),
    Format("Q8_1", 32, 36),
    Format("Q2_K", 256, 84),
    Format("Q3_K", 256, 110),
    Format("Q4_K", 256, 144),
    Format("Q5_K", 256, 176),
    Format("Q6_K", 256, 210),
    Format("Q8_K", 256, 292),
    Format("IQ1_S", 256, 50),
    Format("IQ1_M", 256, 56),
    Format("IQ2_XXS", 256, 66),
    Format("IQ2_XS", 256, 74),
    Format("IQ2_S", 256, 82),
    Format("IQ3_XXS", 256, 98),
    Format("IQ3_S", 256, 110),
    Format("IQ4_NL", 32, 18),
    Format("IQ4_XS", 256, 136),
    Format("TQ1_0", 256, 54),
    Format("TQ2_0", 256, 66),
    Format("MXFP4", 32, 17),
)
FORMATS = {f.name: f for f in _ALL}

# ggml_type numbers of GGUF version 3. Gaps are types that ggml removed.
GGML_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}

SAFETENSORS_DTYPES = frozenset(
    "F64 F32 F16 BF16 I64 I32 I16 I8 U64 U32 U16 U8 BOOL C64 "
    "F8_E4M3 F8_E5M2 F8_E8M0 F6_E2M3 F6_E3M2 F4".split()
)

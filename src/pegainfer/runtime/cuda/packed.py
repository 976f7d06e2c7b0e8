"""Layouts of quantised matrices on a GPU; kernels/cuda/common/packed/form.cuh describes their bytes."""

from __future__ import annotations

import msgspec

from pegainfer.runtime.weights.formats import FORMATS

ROWS, COLUMNS = 16, 128  # of a tile


class PackedForm(msgspec.Struct, frozen=True):
    """Levels of 4 or 8 bits in groups of columns.

    Args:
        name: in the names of kernels.
        group: columns that share a scale.
        word: bytes of a group's scale and zero point or offset.
        offset: the scale comes with an offset, and not with a zero point or alone.
    """

    name: str
    bits: int
    group: int
    word: int = 4
    offset: bool = False

    @property
    def tile_bytes(self) -> int:
        return ROWS * (COLUMNS * self.bits // 8 + COLUMNS // self.group * self.word)

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix, whose rows and columns are filled up to whole tiles."""
        return -(-rows // ROWS) * -(-columns // COLUMNS) * self.tile_bytes


FORMS = {
    f"int{bits}_{name}": PackedForm(f"int{bits}_{name}", bits, group, word, offset)
    for bits in (4, 8)
    for name, group, word, offset in (
        ("g32", 32, 4, False), ("g64", 64, 4, False), ("g128", 128, 4, False),
        ("pair", 32, 4, True), ("full", 32, 8, True),
    )
}  # fmt: skip
FORMS["int8_g16"] = PackedForm("int8_g16", 8, 16)
# The form that holds a storage format exactly, by the format's name.
OF_FORMAT = {
    **{name: form for name, form in FORMS.items() if name in FORMATS},
    "q4_0": FORMS["int4_g32"],
    "q4_1": FORMS["int4_pair"],
    "q4_k": FORMS["int4_full"],
    "q5_0": FORMS["int8_g32"],
    "q5_1": FORMS["int8_pair"],
    "q5_k": FORMS["int8_full"],
    "q6_k": FORMS["int8_g16"],
    "q8_0": FORMS["int8_g32"],
}

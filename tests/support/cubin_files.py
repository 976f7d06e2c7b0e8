"""What the header of a cubin, which is an ELF file, says."""

from __future__ import annotations

import struct

EM_CUDA = 190  # e_machine
OSABI_CUDA_13 = 65  # e_flags have the architecture in their second byte; with an older ABI, in the first


def architecture(cubin: bytes) -> int | None:
    """The SM version, as 90; None for data that is not a cubin."""
    if cubin[:4] != b"\x7fELF" or struct.unpack_from("<H", cubin, 18)[0] != EM_CUDA:
        return None
    flags = int(struct.unpack_from("<I", cubin, 48)[0])
    return flags >> (8 if cubin[7] == OSABI_CUDA_13 else 0) & 0xFF

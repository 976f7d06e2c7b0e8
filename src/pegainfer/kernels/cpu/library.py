"""Finds and loads the C++ library, and describes its functions to ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from ctypes import c_char_p, c_double, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

from pegainfer.contract.errors import ConfigError, UnsupportedError
from pegainfer.kernels.cpu.instructions import declaration_hash

LIBRARY = Path(__file__).with_name("libpega_cpu.dylib" if sys.platform == "darwin" else "libpega_cpu.so")
SOURCES = Path(__file__).with_name("csrc")
BUILD_HINT = "python -m pegainfer.kernels.cpu.build"
ISAS = ("avx512", "avx2", "neon", "portable")  # best first

ERROR_BYTES = 256

# name -> (result, arguments); csrc/api.cpp says what they do
_FUNCTIONS = {
    "pega_declaration_hash": (c_char_p, ()),
    "pega_source_hash": (c_char_p, ()),
    "pega_kernels": (c_void_p, (c_char_p,)),
    "pega_isa_name": (c_char_p, (c_void_p,)),
    "pega_pool_create": (c_void_p, (c_int32, c_int32)),
    "pega_pool_destroy": (None, (c_void_p,)),
    "pega_packed_bytes": (c_int64, (c_int32, c_int64, c_int64, c_int64)),
    "pega_pack": (c_void_p, (c_int32, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int32)),
    "pega_unpack": (None, (c_void_p, c_int64, c_int64, c_void_p)),
    "pega_packed_free": (None, (c_void_p,)),
    "pega_exec_create": (
        c_void_p,
        (c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_char_p),
    ),
    "pega_exec_join": (None, (c_void_p, c_void_p, c_int32, c_int32, c_double)),
    "pega_has_bf16": (c_int32, (c_void_p,)),
    "pega_exec_destroy": (None, (c_void_p,)),
    "pega_exec_error": (c_char_p, (c_void_p,)),
    "pega_exec_clipped": (c_int64, (c_void_p,)),
    "pega_exec_run": (c_int32, (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)),
    "pega_roofline_read": (c_double, (c_void_p, c_void_p, c_void_p, c_int64, c_int64)),
    "pega_roofline_compute": (c_double, (c_void_p, c_void_p, c_int32, c_int64)),
}


@cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises UnsupportedError where it is missing or does not fit its sources."""
    if not LIBRARY.is_file():
        raise UnsupportedError("the C++ library is not built", where=LIBRARY, remedy=BUILD_HINT)
    try:
        lib = ctypes.CDLL(str(LIBRARY))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as e:
        raise UnsupportedError(
            f"the C++ library does not load: {e}", where=LIBRARY, remedy=BUILD_HINT
        ) from None
    built = lib.pega_source_hash().decode()
    if SOURCES.is_dir() and built != source_hash():
        raise UnsupportedError(
            "the C++ library was built from other sources", expected=source_hash()[:12], got=built[:12],
            where=LIBRARY, remedy=BUILD_HINT,
        )  # fmt: skip
    declared = lib.pega_declaration_hash().decode()
    if declared != declaration_hash():
        raise UnsupportedError(
            "the C++ library was built for other declarations of the ops",
            expected=declaration_hash()[:12], got=declared[:12], where=LIBRARY,
            remedy=f"python -m pegainfer.kernels.headers, then {BUILD_HINT}",
        )  # fmt: skip
    return lib


def source_hash() -> str:
    """SHA-256 over the sources' own hashes in the order of their paths, as CMakeLists.txt makes it."""
    files = [f for part in (SOURCES, SOURCES / "isa") for f in part.iterdir() if f.suffix in (".cpp", ".h")]
    hashes = "".join(hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(files, key=str))
    return hashlib.sha256(hashes.encode()).hexdigest()


def kernels(isa: str | None = None) -> int:
    """Address of the kernel table: of `isa`, else of PEGAINFER_ISA, else the best of this processor.

    Raises ConfigError for an instruction set that is unknown or that this processor lacks.
    """
    wanted = isa or os.environ.get("PEGAINFER_ISA") or ""
    table = library().pega_kernels(wanted.encode())
    if table is None:
        raise ConfigError(
            "no kernels for this instruction set",
            expected=" ".join(name for name in ISAS if library().pega_kernels(name.encode())), got=wanted,
            remedy="leave it to the engine, or name one of those expected",
        )  # fmt: skip
    return int(table)


def isa_name(isa: str | None = None) -> str:
    """Name of the instruction set that `kernels` chooses."""
    name: bytes = library().pega_isa_name(kernels(isa))
    return name.decode()


def supported_isas() -> tuple[str, ...]:
    """Instruction sets that this processor runs, best first."""
    return tuple(name for name in ISAS if library().pega_kernels(name.encode()))


def has_bf16(isa: str | None = None) -> bool:
    """Whether these kernels multiply bf16 by bf16 on this processor."""
    return bool(library().pega_has_bf16(kernels(isa)))

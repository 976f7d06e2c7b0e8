"""Copies the page's JavaScript libraries, at pinned versions, from their packages into the package.

    python tools/vendor_page.py            copy them anew (needs npm)

`vendor/libraries.json` names each file's package, version, licence and SHA-256; a test compares the sums. To
update a library, change its version here and run this again.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

VENDOR = Path(__file__).parents[1] / "src/pegainfer/frontend/http/static/vendor"


class Library(NamedTuple):
    package: str
    version: str
    licence: str
    file: str  # within the package
    name: str  # here
    suffix: str = ""  # added to the file, for one that is no ES module and defines no global either


LIBRARIES = (
    Library("markdown-it", "14.3.3", "MIT", "dist/markdown-it.min.js", "markdown-it.min.js"),
    Library("dompurify", "3.5.0", "Apache-2.0 or MPL-2.0", "dist/purify.min.js", "purify.min.js"),
    Library("@highlightjs/cdn-assets", "11.12.0", "BSD-3-Clause", "es/highlight.min.js", "highlight.min.js"),
    Library("temml", "0.13.5", "MIT", "dist/temml.min.js", "temml.min.js", "\nexport default temml;\n"),
)


def main() -> None:
    VENDOR.mkdir(exist_ok=True)
    listed = {}
    for library in LIBRARIES:
        with tempfile.TemporaryDirectory() as folder:
            spec = f"{library.package}@{library.version}"
            packed = subprocess.run(
                ["npm", "pack", "--silent", spec], cwd=folder, check=True, capture_output=True, text=True
            ).stdout.split()[-1]
            with tarfile.open(Path(folder, packed)) as archive:
                source = _read(archive, library.file) + library.suffix.encode()
                licence = _read(archive, "LICENSE")
        (VENDOR / library.name).write_bytes(source)
        (VENDOR / f"{library.name.split('.')[0]}.LICENSE").write_bytes(licence)
        listed[library.name] = {
            "package": library.package,
            "version": library.version,
            "licence": library.licence,
            "sha256": hashlib.sha256(source).hexdigest(),
        }
    (VENDOR / "libraries.json").write_text(json.dumps(listed, indent=2) + "\n")


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(f"package/{name}")
    assert member is not None, f"{name} is no file of the package"
    return member.read()


if __name__ == "__main__":
    main()

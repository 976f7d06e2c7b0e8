"""The user's cache folder: fetched models, and kernels where the package's own folder cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

from pegainfer.contract.errors import ConfigError

CACHE_VARIABLE = "PEGAINFER_CACHE"


def cache_folder() -> Path:
    """$PEGAINFER_CACHE, else pegainfer in $XDG_CACHE_HOME, else ~/.cache/pegainfer. Raises ConfigError."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "pegainfer"
    try:
        return Path.home() / ".cache" / "pegainfer"
    except RuntimeError:
        raise ConfigError("there is no home folder", remedy=f"set {CACHE_VARIABLE} to a folder") from None

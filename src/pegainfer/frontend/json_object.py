"""A JSON object whose fields have no types here: a schema, a tool as its client wrote it, an item."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]

"""Server-sent events, as far as an answer uses them: the data of each event."""

from __future__ import annotations


class EventParser:
    """Fed with bytes as they come; lines may end in LF or CRLF and be cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""  # the last line, not ended yet
        self._data: list[bytes] = []  # data lines of the event that has not ended

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that these bytes complete; several data lines are joined by LF."""
        lines = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = lines.pop()
        events: list[bytes] = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if not line:
                if self._data:
                    events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        return events

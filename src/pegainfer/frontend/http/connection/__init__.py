"""Connections: the sockets, bounds on HTTP/1.1, keys, browsers, and which endpoint a path leads to."""

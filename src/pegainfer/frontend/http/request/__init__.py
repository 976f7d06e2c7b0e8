"""Requests: from the bytes of a body to what the engine takes, or an error that names the field."""

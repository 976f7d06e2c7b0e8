"""Answers: a generation and its choices on their way from the engine to the client."""

"""Structured output: what a request may ask for, and its check in a process that can be killed."""

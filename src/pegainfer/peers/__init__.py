"""Connections between a prefill engine and decode engines, over TCP or memory shared on one host."""

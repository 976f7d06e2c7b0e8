"""Metrics of the server, records of requests, and traces."""

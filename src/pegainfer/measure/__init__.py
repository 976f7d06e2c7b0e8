"""Measurements: the ledger, op and step benches, rooflines, workloads and reports."""

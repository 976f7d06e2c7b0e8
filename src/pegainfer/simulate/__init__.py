"""The real scheduler on a virtual clock, with steps priced from the ledger."""

"""KV bookkeeping: ids, references and hashes of blocks; the memory itself belongs to the runner."""

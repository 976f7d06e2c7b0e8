"""Tool calls: how each model family writes them, found in its output and enforced by grammar."""

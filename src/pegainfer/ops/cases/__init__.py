"""Hostile inputs and error bounds of the ops: one file a family, beside the declarations that name them."""

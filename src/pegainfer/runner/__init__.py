"""How plans become steps: the parts that a line's engine.py composes its runner of."""

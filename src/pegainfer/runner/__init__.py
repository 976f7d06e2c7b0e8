"""How plans become steps for every line whose sequences keep pages: what its engine.py is assembled from."""

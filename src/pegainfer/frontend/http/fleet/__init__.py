"""Several models in one server: loaded when a request names them, unloaded by LRU and --keep-alive."""

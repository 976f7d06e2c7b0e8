"""KV groups in a device's memory: the layout that a line declares for each group, and the pools."""

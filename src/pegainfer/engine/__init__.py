"""The scheduler (pure), the loop that drives a runner with it, and the engine's own process."""

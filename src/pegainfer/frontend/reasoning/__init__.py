"""What a model thinks before it answers, kept apart from the answer."""

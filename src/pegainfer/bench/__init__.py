"""The load client: what it sends, when, what it measures, and how it is shown. Knows servers only by HTTP."""

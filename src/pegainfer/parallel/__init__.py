"""Several ranks as one runner. The scheduler plans for the group; every rank gets the same frozen plans."""

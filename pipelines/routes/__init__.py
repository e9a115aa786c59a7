"""Routes: names that stand for several models, of which the first that can answers."""

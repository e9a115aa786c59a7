"""Several engines of one model as one engine."""

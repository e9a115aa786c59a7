"""Retrieval-augmented generation: how good, how fast."""

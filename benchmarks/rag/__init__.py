"""Benchmarks of retrieval-augmented generation: quality and speed."""

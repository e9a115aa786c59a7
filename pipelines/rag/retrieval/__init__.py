"""Finds the chunks that may answer a question: fusion, reranking, deduplication."""

"""Retrieval-augmented generation: documents to chunks to vectors, questions to sources to prompts."""

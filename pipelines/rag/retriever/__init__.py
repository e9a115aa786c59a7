"""Retrieval as a model: a question and its vector in, the chunks that may answer it out."""

"""Answers of language models and encoders that are kept for equal requests."""

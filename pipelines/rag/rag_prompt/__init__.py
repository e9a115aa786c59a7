"""Prompt assembly as a model: a question and retrieved chunks in, the language model's messages out."""

"""Prompt assembly as a model: a question and chunks in, what the language model reads out."""

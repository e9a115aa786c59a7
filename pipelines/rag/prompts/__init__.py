"""Builds a language model's prompt from a question and retrieved passages, within its context."""

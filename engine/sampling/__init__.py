"""Sampling: chooses token ids from logits."""

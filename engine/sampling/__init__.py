"""Logits to token ids."""

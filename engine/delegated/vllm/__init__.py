"""vLLM behind the same protocol as our own executor."""

"""LLM execution: token ids in, token events out. Knows no text, no HTTP and no model repository."""

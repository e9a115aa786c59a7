"""Remote models behind an OpenAI-compatible API."""

"""From chunks and a question to what the language model reads."""

"""Text to token ids, as a model: what stands before an encoder."""

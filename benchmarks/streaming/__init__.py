"""The gateway as a streaming front end: with an engine that computes nothing, beside vLLM's, and over many requests."""

"""Responses kept to be given again to equal requests (`response_cache`)."""

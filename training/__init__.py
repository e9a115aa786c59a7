"""Bundled models and the code that makes them."""

"""The code that makes the bundled models."""

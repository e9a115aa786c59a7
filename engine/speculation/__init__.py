"""Speculation: draft tokens, of which the model checks many in one step."""

"""Samples of the server's current work, taken while there is a listener."""

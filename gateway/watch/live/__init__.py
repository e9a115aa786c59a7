"""Samples of the server's work at this moment, taken while somebody watches."""

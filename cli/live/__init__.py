"""A running server as commands see it: its metrics, its health and its open requests."""

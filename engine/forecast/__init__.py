"""How long a request will wait."""

"""Watches a run beside its requests: by the server's metrics, and by meters of energy."""

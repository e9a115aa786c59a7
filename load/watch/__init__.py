"""What a run learns beside its requests: from the server's metrics, and from meters of energy."""

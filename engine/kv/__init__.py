"""KV blocks: who holds which, what can be shared, and the tables that the runner reads."""

"""Collections in one SQLite file: exact vector search, FTS5, transactions, and no server."""

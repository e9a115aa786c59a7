"""Collections in a SQLite file: exact vector search, and BM25 by FTS5."""

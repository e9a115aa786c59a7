"""Collections in Postgres with pgvector, for many chunks or several gateways. Needs the extra `postgres`."""

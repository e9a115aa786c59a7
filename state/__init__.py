"""State that outlives a request: stores, logs, counters and leases, in memory, SQLite, Redis and Postgres."""

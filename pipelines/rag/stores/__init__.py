"""Stores that keep collections: a SQLite file, or Postgres with pgvector."""

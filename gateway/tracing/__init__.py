"""Traces: recordings of requests, which of them are kept, and where they go."""

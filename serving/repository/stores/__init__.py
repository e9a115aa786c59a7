"""Model repositories in remote stores that fsspec reads, mirrored into a local cache."""

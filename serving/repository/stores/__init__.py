"""Model repositories in remote stores: whatever fsspec reads, mirrored into a local cache."""

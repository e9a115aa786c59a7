"""Benchmarks of the v2 protocol, in part beside the real tritonserver."""

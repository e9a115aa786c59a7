"""The v2 protocol beside the real tritonserver, in one run."""

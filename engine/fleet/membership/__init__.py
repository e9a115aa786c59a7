"""Where a fleet hears which engines it may use: a file, a store, an orchestrator. None of them says whether an engine
serves; its own heartbeat does."""

SCHEME = "k8s://"
"""Begins the name of a service of Kubernetes, where another source is named by a file."""

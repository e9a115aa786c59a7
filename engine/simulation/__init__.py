"""Fleets of engines in simulated time: the planner, the KV cache manager and the router as they serve, and a model of
what a step costs in place of a runtime."""

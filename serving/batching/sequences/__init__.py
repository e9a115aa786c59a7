"""Requests that belong together: run one after the other, in order, on the instance that holds their state."""

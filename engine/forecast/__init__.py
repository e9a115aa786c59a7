"""The forecast of how long a request waits."""

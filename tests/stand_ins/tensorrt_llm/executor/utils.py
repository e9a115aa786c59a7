"""Errors of requests."""


class RequestError(RuntimeError):
    """One request failed; the others go on."""

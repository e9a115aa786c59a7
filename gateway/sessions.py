"""The headers that name a request's session: HTTP's, and gRPC's metadata."""

from collections.abc import Mapping, Sequence

STICKY_HEADER = "x-sluice-sticky"
"""Chooses the version of a model whose versions share its requests, and is the session where no header names one."""


def find_session(headers: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the session that the first of the headers `names` has, or else the sticky key; "" for none."""
    return next((value for name in (*names, STICKY_HEADER) if (value := headers.get(name))), "")

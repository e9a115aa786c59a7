"""What the headers of a request add to it: scheduling, and parameters that an operator's pattern lets through."""

import re

from gateway.http.protocol import NAMES_AS_SENT
from gateway.http.scheduling import STICKY as STICKY_TEXT
from gateway.http.scheduling import scheduling_of
from gateway.http.v2.exchange import Exchange
from gateway.options.config import RequestOptions
from serving.request import InferRequest

STICKY = STICKY_TEXT.encode()
"""Requests with one text in it get one version."""
_OURS = b"x-sluice-"


class HeaderReader:
    """Reads headers into requests. An empty `pattern` forwards none."""

    def __init__(self, defaults: RequestOptions, pattern: str) -> None:
        self._defaults = defaults
        self._pattern = re.compile(pattern, re.IGNORECASE) if pattern else None

    def schedule(self, exchange: Exchange, request: InferRequest) -> None:
        """Tenant, priority and time limits. A header wins over the body. Raises INVALID, naming the header."""
        ours = [name for name in exchange.headers if name.startswith(_OURS)]
        if not ours:
            return
        found = scheduling_of({name.decode("latin-1"): exchange.header(name) for name in ours}, self._defaults)
        request.tenant = found.tenant
        if found.priority is not None:
            request.priority = found.priority
        if found.timeout_s is not None:
            request.timeout_us = round(found.timeout_s * 1e6)
        if found.queue_timeout_s is not None:
            request.queue_timeout_us = round(found.queue_timeout_s * 1e6)

    def forward(self, exchange: Exchange, request: InferRequest) -> None:
        """Put the headers that the operator lets through among the model's parameters."""
        if self._pattern is None:
            return
        sent = exchange.scope.get("extensions", {}).get(NAMES_AS_SENT)
        names = sent or [name for name, _ in exchange.scope["headers"]]
        for name, (_, value) in zip(names, exchange.scope["headers"], strict=True):
            text = name.decode("latin-1")
            if self._pattern.search(text):
                request.parameters[text] = value.decode("utf-8", "replace")

"""The log: standard error or a file, lines of text or of JSON, with the id of the request that a line is about."""

import logging
import os
import sys
from contextvars import ContextVar
from typing import TextIO

from sluice.gateway.watch.logs.ring import LogRing
from sluice.log_lines import JsonFormatter, TextFormatter
from sluice.log_relay import LogRelay
from sluice.log_repeats import LimitedHandler

NO_REQUEST = "-"
current_request_id: ContextVar[str] = ContextVar("current_request_id", default=NO_REQUEST)
"""Id of the request that this task serves."""

_STDERR = 2
_FORMAT = "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"


class RequestIdFilter(logging.Filter):
    """Adds `request_id` to every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = getattr(record, "own_request_id", None) or current_request_id.get()
        return True


def configure_logging(level: str, file: str = "", *, is_json: bool = False, relay: LogRelay | None = None) -> None:
    """Log from `level` up to standard error, or to `file`. The web server's own lines show at debug only.

    With `file`, lines that engines and libraries write to standard error go there too; the command's own, to
    `sys.stderr`, still reach the terminal. The last lines are kept to be shown, or sent by `relay` to the process that
    shows them. Raises OSError for a file that cannot be written.
    """
    handler = LimitedHandler(_redirect_stderr(file) if file else None, current_request_id.get)
    handler.addFilter(RequestIdFilter())
    handler.setFormatter(JsonFormatter("-") if is_json else TextFormatter(_FORMAT))
    shown = LogRing(current_request_id.get) if relay is None else relay
    shown.addFilter(RequestIdFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler, shown])
    if level != "debug":
        for name in ("uvicorn", "aiobotocore", "botocore", "httpx", "httpx2"):
            logging.getLogger(name).setLevel(max(logging.WARNING, logging.root.level))


def _redirect_stderr(file: str) -> TextIO:
    """Redirect the descriptor of standard error, which child processes inherit, to `file`."""
    with open(file, "a") as opened:
        terminal = os.dup(_STDERR)
        os.dup2(opened.fileno(), _STDERR)
    sys.stderr = open(terminal, "w", buffering=1)  # noqa: SIM115 - open for as long as the process lives
    return open(_STDERR, "w", buffering=1, closefd=False)

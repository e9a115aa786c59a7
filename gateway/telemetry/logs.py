"""The log: standard error, one format, with the id of the request that a line is about."""

import logging
from contextvars import ContextVar

current_request_id: ContextVar[str] = ContextVar("current_request_id", default="-")
"""The id of the request that this task serves."""

_FORMAT = "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"


class RequestIdFilter(logging.Filter):
    """Adds `request_id` to every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = current_request_id.get()
        return True


def configure_logging(level: str) -> None:
    """Send everything from `level` up to standard error. The web server's small talk shows at debug only."""
    handler = logging.StreamHandler()
    handler.addFilter(RequestIdFilter())
    logging.basicConfig(level=level.upper(), format=_FORMAT, handlers=[handler])
    if level != "debug":
        logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.root.level))

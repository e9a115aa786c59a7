"""Lines of the log as JSON objects, for the gateway's process and the engines'."""

import json
import logging
import time

JSON = "json"


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on a line: time (UTC, ISO 8601), level, logger, request_id, message, and
    exception with the traceback where there is one."""

    def __init__(self, request_id: str | None = None) -> None:
        """Take what stands as `request_id` in records that have none of their own."""
        super().__init__()
        self._request_id = request_id

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without an end of line in it."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "request_id": getattr(record, "request_id", self._request_id),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, ensure_ascii=False, default=str)


def is_logging_json() -> bool:
    """Whether this process logs lines of JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.root.handlers)

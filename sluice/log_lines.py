"""Lines of the log, as text and as JSON objects, for the gateway's process and the engines'. Secrets are taken out."""

import json
import logging
import re
import textwrap
import time
from types import TracebackType

HIDDEN = "[redacted]"
_NAMES = "(?:api[_-]?key|x-api-key|password|passwd|secret|access[_-]?token|auth[_-]?token)"
_SECRETS = (
    # A key of ours keeps its public id, by which `sluice keys list` finds it.
    (re.compile(r"\b(sk-sluice-[0-9a-f]{12}-)[\w-]{8,}"), rf"\1{HIDDEN}"),
    (re.compile(r"\b(sk-|hf_|nvapi-|ghp_|xox[bp]-)(?!sluice-)[\w-]{16,}"), rf"\1{HIDDEN}"),
    (re.compile(r"\b(bearer|basic)(\s+)[\w.~+/=-]{8,}", re.IGNORECASE), rf"\1\2{HIDDEN}"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@]*:)[^\s/@]+(?=@)", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(rf"\b({_NAMES}[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&)}}]{{4,}}", re.IGNORECASE), rf"\1{HIDDEN}"),
)


def redact(text: str) -> str:
    """Return the text without what looks like a secret."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


JSON = "json"
_ESCAPED = {code: ascii(chr(code))[1:-1] for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}
"""Characters that end a line or steer a terminal."""
_Error = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class TextFormatter(logging.Formatter):
    """Formats a record as text in which a message, parts of which clients may have sent, can imitate no other line:
    control characters are escaped, and the lines of a traceback are indented. Secrets are left out."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return redact(super().formatMessage(record)).translate(_ESCAPED)

    def formatException(self, ei: _Error) -> str:
        lines = redact(super().formatException(ei)).splitlines()
        return textwrap.indent("\n".join(line.translate(_ESCAPED) for line in lines), "  ")


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on a line: time (UTC, ISO 8601), level, logger, request_id, message, and
    exception with the traceback where there is one."""

    def __init__(self, request_id: str | None = None) -> None:
        """Set the `request_id` of records that have none of their own."""
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
            "message": redact(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = redact(self.formatException(record.exc_info))
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, ensure_ascii=False, default=str)


def message_of(record: logging.LogRecord) -> str:
    """Return a record's message and traceback without secrets."""
    message = record.getMessage()
    if record.exc_info:
        message = f"{message}\n{logging.Formatter().formatException(record.exc_info)}"
    return redact(message)


def is_logging_json() -> bool:
    """Whether this process logs lines of JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.root.handlers)

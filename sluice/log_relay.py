"""Brings the lines that a server's other processes log to the one that shows them all.

Each process connects to a socket of that one and writes a JSON object a line. Writing never waits: a line for which the
socket has no room is left out and counted. The lines still go where the process logs them itself.
"""

import json
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from sluice.log_lines import JSON, is_logging_json, message_of
from sluice.log_repeats import RepeatLimiter

MAX_MESSAGE_CHARS = 4000
"""A longer message is cut, so that kept lines have a bound."""
_LEFT_OUT = "%d lines before this one were left out: the process that shows them did not read in time"


class LineCollector(logging.Handler):
    """The handler of a process that shows lines of others. `socket_name` is where it takes them, "" for nowhere."""

    socket_name = ""


class ProcessLog(NamedTuple):
    """The logging of a child process: its lowest level, its format, and a further receiver."""

    level: str
    is_json: bool
    socket_name: str

    @classmethod
    def as_here(cls) -> "ProcessLog":
        """Return the logging of this process, and its collector of lines."""
        return cls(logging.getLevelName(logging.root.level), is_logging_json(), collecting_socket())

    def to_argument(self) -> str:
        """Return a word of a command line without anything that a launcher's shell might take apart."""
        return ",".join((self.level, JSON if self.is_json else "text", self.socket_name.replace("\0", "@")))

    @classmethod
    def from_argument(cls, text: str) -> "ProcessLog":
        """Parse the argument that `to_argument` wrote."""
        level, log_format, socket_name = text.split(",", 2)
        return cls(level, log_format == JSON, socket_name.replace("@", "\0"))


def collecting_socket() -> str:
    """Return the socket at which this process takes lines of others; "" for none."""
    names = (each.socket_name for each in logging.root.handlers if isinstance(each, LineCollector))
    return next(names, "")


def about(request_id: str) -> dict[str, str]:
    """Return the `extra` of a line about a request, for a process that has no task for each."""
    return {"own_request_id": request_id}


def from_process(name: str) -> dict[str, str]:
    """Return the `extra` of a line that this process logs for another one."""
    return {"own_process": name}


def cut_message(message: str) -> str:
    """Return a message of at most `MAX_MESSAGE_CHARS`, and the mark of what is left out."""
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + " ..."


class LogRelay(logging.Handler):
    """Sends the lines of this process to the one that collects them. Any thread may log. Repeats are counted."""

    def __init__(self, socket_name: str, process: str, find_request: Callable[[], str] = lambda: "-") -> None:
        """`process` names this one; `find_request` returns the request that a line is about, "-" or that name for none.
        Raises OSError where nobody collects at `socket_name`."""
        super().__init__()
        self._process = process
        self._find_request = find_request
        self._limiter = RepeatLimiter(find_request=find_request)
        self._socket_name = socket_name
        self._num_left_out = 0
        self._connect()

    def _connect(self) -> None:
        self._owner = os.getpid()
        self._rest = b""
        """The end of a line whose beginning was taken."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(self._socket_name)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def handle(self, record: logging.LogRecord) -> bool:
        passes = False
        for each in self._limiter.take(record):
            passes = super().handle(each)
        return passes

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._owner != os.getpid():  # a fork, whose lines must not mix with those of the process above it
                self._connect()
            if self._num_left_out:
                told = logging.makeLogRecord({"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"})
                told.msg, told.args = _LEFT_OUT, (self._num_left_out,)
                self._send(told)
                self._num_left_out = 0
            self._send(record)
        except OSError:  # there is no room, or the collecting process has ended
            self._num_left_out += 1
        except Exception:
            self.handleError(record)

    def _send(self, record: logging.LogRecord) -> None:
        """Write a line, as far as the socket takes it. Raises BlockingIOError where it takes nothing of it."""
        while self._rest:
            self._rest = self._rest[self._write(self._rest) :]
        line = self._encode(record)
        self._rest = line[self._write(line) :]

    def _write(self, data: bytes) -> int:
        return self._socket.send(data, socket.MSG_NOSIGNAL)

    def _encode(self, record: logging.LogRecord) -> bytes:
        request_id = getattr(record, "own_request_id", "") or self._find_request()
        line = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "request_id": "-" if request_id == self._process else request_id,
            "message": cut_message(message_of(record)),
            "process": self._process,
        }
        return json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"

    def close(self) -> None:
        for each in self._limiter.take_rest():
            super().handle(each)
        with suppress(OSError):
            self._socket.close()
        super().close()


def relay_own_logs() -> None:
    """Relay lines of libraries too whose loggers pass nothing on to the root, as those of vLLM and TensorRT-LLM."""
    relays = [each for each in logging.root.handlers if isinstance(each, LogRelay)]
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and not logger.propagate:
            for relay in relays:
                logger.addHandler(relay)

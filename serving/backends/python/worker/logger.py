"""`pb_utils.Logger`: the model's lines, written to the server's log."""

import sys
from collections.abc import Callable
from enum import IntEnum

from serving.backends.python.worker.arguments import text


class _LogLevel(IntEnum):
    """Values are those of `logging`, which is not imported here: it is slow to."""

    VERBOSE = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


class Logger:
    """Has only class methods, as models call them."""

    LogLevel = _LogLevel
    VERBOSE = _LogLevel.VERBOSE
    INFO = _LogLevel.INFO
    WARNING = _LogLevel.WARNING
    ERROR = _LogLevel.ERROR

    _write: Callable[[int, str, str], None] | None = None

    @classmethod
    def log(cls, message: str, level: _LogLevel = _LogLevel.INFO) -> None:
        """Raises TypeError for what is no message or no level."""
        if not isinstance(level, _LogLevel):
            raise TypeError(f"level is one of Logger.LogLevel, not {level!r}")
        cls._log(level, message)

    @classmethod
    def log_info(cls, message: str) -> None:
        cls._log(_LogLevel.INFO, message)

    @classmethod
    def log_warn(cls, message: str) -> None:
        cls._log(_LogLevel.WARNING, message)

    @classmethod
    def log_error(cls, message: str) -> None:
        cls._log(_LogLevel.ERROR, message)

    @classmethod
    def log_verbose(cls, message: str) -> None:
        cls._log(_LogLevel.VERBOSE, message)

    @classmethod
    def _log(cls, level: int, message: str) -> None:
        if cls._write is None:
            raise RuntimeError("the logger works in a worker process only")
        caller = sys._getframe(2)
        file = caller.f_code.co_filename.rpartition("/")[2]
        cls._write(int(level), f"{file}:{caller.f_lineno}", text(message, "message"))

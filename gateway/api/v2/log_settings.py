"""Triton's logging extension: which levels are logged, and how times are written."""

import logging
import time
from collections.abc import Mapping

from sluice.errors import ErrorCode, SluiceError
from sluice.log_lines import JSON, is_logging_json

LogValue = bool | int | str
LOG_SETTINGS = ("log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format")
"""Names of the settings, in the order in which Triton checks them."""
_FORMATS = {"default": None, "ISO8601": "%Y-%m-%dT%H:%M:%SZ"}
"""How times are written, by Triton's `log_format`."""
_SWITCHES = {"log_info": logging.INFO, "log_warning": logging.WARNING, "log_error": logging.ERROR}


class LogSettings:
    """The settings of a logger, as clients read and change them.

    A verbose level above 0 lets debug messages through; Triton's several levels are one here.
    """

    def __init__(self, logger: logging.Logger | None = None, file: str = "") -> None:
        """`logger` is the root logger by default. `file` is only reported: clients cannot change where the log goes."""
        self._logger = logger or logging.getLogger()
        self._file = file
        level = self._logger.getEffectiveLevel()
        self._is_on = {name: level <= switched for name, switched in _SWITCHES.items()}
        self._verbose_level = int(level <= logging.DEBUG)
        self._formats = (JSON,) if is_logging_json() else tuple(_FORMATS)
        """The formats that clients may ask for. Lines of JSON stay so: whoever collects them relies on it."""
        self._format = self._formats[0]
        self._filter = _LevelFilter(self._is_on)
        self._level_before = self._logger.level

    def close(self) -> None:
        """Leave the logger as it was found."""
        self._logger.setLevel(self._level_before)
        for handler in self._logger.handlers:
            handler.removeFilter(self._filter)

    def get(self) -> dict[str, LogValue]:
        """Return the settings as the protocol writes them."""
        return {
            "log_file": self._file,
            **self._is_on,
            "log_verbose_level": self._verbose_level,
            "log_format": self._format,
        }

    def update(self, values: Mapping[str, LogValue | None]) -> None:
        """Change the settings that `values` name; None and unknown names change nothing.

        The caller checks the types. Raises SluiceError, and then nothing has changed.
        """
        changes = {name: value for name, value in values.items() if value is not None}
        if "log_file" in changes:
            text = "log file location can not be updated through network protocol"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, text)
        log_format = str(changes.get("log_format", self._format))
        if log_format not in self._formats:
            raise SluiceError(ErrorCode.UNAVAILABLE, f"invalid argument for --log_format, got: {log_format}")
        self._is_on |= {name: bool(changes[name]) for name in _SWITCHES if name in changes}
        self._verbose_level = int(str(changes.get("log_verbose_level", self._verbose_level)))
        self._format = log_format
        self._apply()

    def _apply(self) -> None:
        levels = [level for name, level in _SWITCHES.items() if self._is_on[name]]
        lowest = logging.DEBUG if self._verbose_level else min(levels, default=logging.CRITICAL)
        self._logger.setLevel(lowest)
        self._filter.is_on = self._is_on
        for handler in self._logger.handlers:
            if self._filter not in handler.filters:
                handler.addFilter(self._filter)
            if handler.formatter is not None and self._format in _FORMATS:
                handler.formatter.datefmt = _FORMATS[self._format]
                handler.formatter.converter = time.gmtime if _FORMATS[self._format] else time.localtime


class _LevelFilter(logging.Filter):
    """Drops records of levels that are switched off while lower ones are on."""

    def __init__(self, is_on: Mapping[str, bool]) -> None:
        super().__init__()
        self.is_on = is_on

    def filter(self, record: logging.LogRecord) -> bool:
        name = next((name for name, level in _SWITCHES.items() if level == record.levelno), None)
        return name is None or self.is_on[name]

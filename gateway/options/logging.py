"""The options of `sluice serve` for the log: one level, or tritonserver's switches for each."""

from dataclasses import dataclass

from gateway.options.option import choice, integer, option, text_of, truth

_FLAG = "BOOL"


@dataclass(frozen=True, slots=True)
class LoggingOptions:
    """Logging: to standard error. Clients may change it at /v2/logging"""

    level: str = option(
        "--log-level",
        "info",
        choice("debug", "info", "warning", "error"),
        "LEVEL",
        "debug, info, warning or error",
    )
    verbose: int = option(
        "--log-verbose", 0, integer(0, 2**31 - 1), "LEVEL", "tritonserver's way to ask for debug: any level above 0"
    )
    has_info: bool | None = option("--log-info", None, truth, _FLAG, "whether lines of that level are logged")
    has_warning: bool | None = option("--log-warning", None, truth, _FLAG, "whether lines of that level are logged")
    has_error: bool | None = option("--log-error", None, truth, _FLAG, "whether lines of that level are logged")
    time_format: str = option(
        "--log-format", "default", choice("default", "ISO8601"), "FORMAT", "how times are written: default or ISO8601"
    )
    file: str = option(
        "--log-file", "", text_of("the path of a file"), "PATH", "append the log to a file instead of standard error"
    )

    @property
    def lowest_level(self) -> str:
        """What the log begins at."""
        return "debug" if self.verbose else self.level

    def settings(self) -> dict[str, bool | int | str]:
        """What is asked for beside the level, as the logging extension of the v2 protocol spells it."""
        given = {"log_info": self.has_info, "log_warning": self.has_warning, "log_error": self.has_error}
        settings: dict[str, bool | int | str] = {name: value for name, value in given.items() if value is not None}
        if self.verbose:
            settings["log_verbose_level"] = self.verbose
        if self.time_format != "default":
            settings["log_format"] = self.time_format
        return settings

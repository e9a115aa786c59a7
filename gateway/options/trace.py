"""`--trace-config` of `sluice serve`, as tritonserver has it: settings by key, which clients may change later."""

from dataclasses import dataclass

from gateway.options.option import option

_RATE, _COUNT, _FREQUENCY = "rate", "count", "log-frequency"
_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_ALLOWED = (
    "triton,file=PATH, level=TIMESTAMPS, level=TENSORS, rate=N (one request of N is traced), count=N (-1: no limit) "
    "or triton,log-frequency=N"
)


def _setting(text: str) -> tuple[str, str]:
    """KEY=VALUE, where `triton,` may stand before what belongs to that mode."""
    key, equals, value = text.removeprefix("triton,").partition("=")
    is_number = value.isdecimal() or (key == _COUNT and value == "-1")
    is_known = {
        "file": bool(value),
        "level": value in _LEVELS,
        _RATE: is_number,
        _COUNT: is_number,
        _FREQUENCY: is_number,
        "mode": value == "triton",
    }
    if not equals or not is_known.get(key, False):
        raise ValueError(_ALLOWED)
    return key, value


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Tracing: where the time of single v2 requests goes"""

    settings: tuple[tuple[str, str], ...] = option(
        "--trace-config",
        (),
        _setting,
        "KEY=VALUE",
        f"{_ALLOWED}. Without a file nothing can be traced; with one, clients choose levels and rates by "
        "/v2/trace/setting. May be given several times",
        is_many=True,
        separator=";",
    )

    def _last(self, key: str, default: str) -> str:
        return next((value for name, value in reversed(self.settings) if name == key), default)

    @property
    def file(self) -> str:
        return self._last("file", "")

    @property
    def levels(self) -> frozenset[str]:
        return frozenset(value for name, value in self.settings if name == "level") - {"OFF"}

    @property
    def rate(self) -> int:
        return int(self._last(_RATE, "1000"))

    @property
    def count(self) -> int:
        return int(self._last(_COUNT, "-1"))

    @property
    def log_frequency(self) -> int:
        return int(self._last(_FREQUENCY, "0"))

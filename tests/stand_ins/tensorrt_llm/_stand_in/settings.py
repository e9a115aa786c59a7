"""Settings of the stand-in, read from the environment. The README beside the package describes every variable."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

VERSIONS = ("1.2.1", "1.3.0rc5", "1.3.0", "1.4.0")

_WITHOUT = {"1.2.1": frozenset({"_check_health", "cached_tokens"})}
"""It is not sure which versions have them: one does not, so that tests meet both."""
_RANK_DEATH = {"1.2.1": "hang"}

_FAULTS = {
    "hang_after",
    "exit_after",
    "error_on_token",
    "cuda_error",
    "stats_raise",
    "stats_empty",
    "stats_null",
    "load_error",
    "unhealthy",
    "image_hashes",
    "image_memory",
    "transfer_lost",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one import."""

    version: str
    step_s: float
    faults: Mapping[str, str]
    """Value by name; "" for a fault that has none."""
    fault_once: Path | None
    """Marker file: a fault that finds it does not happen, and one that happens makes it."""
    rank_death: str
    """Effect of a dead rank on the requests in flight: error, hang or exit. Those of 1.2 hang."""
    script: Path | None
    end_token: str
    """Whether the end token is in `token_ids`: in, out, or auto (in for PyTorch, out for compiled engines)."""
    kv_tokens: int
    """Tokens that the KV cache holds where `kv_cache_config.max_tokens` does not say."""
    record: Path | None
    """File that the constructor's arguments and every request are written to, a JSON object a line."""

    @property
    def surface(self) -> str:
        """The version whose API files the classes are made from."""
        return "1.3.0" if self.version == "1.3.0rc5" else self.version

    def has(self, attribute: str) -> bool:
        return attribute not in _WITHOUT.get(self.version, ())

    def fault(self, name: str) -> str | None:
        """Return the value of a fault that is on, else None."""
        return self.faults.get(name)

    def claims(self, name: str) -> bool:
        """Return whether this fault is on and happens now; with a marker file it happens once, over all processes."""
        if name not in self.faults:
            return False
        if self.fault_once is None:
            return True
        try:
            self.fault_once.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


@cache
def settings() -> Settings:
    """Return the settings of the environment. Raises ValueError for a value that the stand-in does not know."""
    return read_settings(os.environ)  # noqa: TID251


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Return the settings that these variables have."""
    version = environment.get("STAND_IN_VERSION", VERSIONS[0])
    if version not in VERSIONS:
        raise ValueError(f"STAND_IN_VERSION must be one of {', '.join(VERSIONS)}, got {version!r}")
    faults = _read_faults(environment.get("STAND_IN_FAULT", ""))
    return Settings(
        version=version,
        step_s=float(environment.get("STAND_IN_STEP_MS", "0")) / 1000,
        faults=faults,
        fault_once=_path(environment, "STAND_IN_FAULT_ONCE"),
        rank_death=_choice(environment, "STAND_IN_RANK_DEATH", ("error", "hang", "exit"), _RANK_DEATH.get(version)),
        script=_path(environment, "STAND_IN_SCRIPT"),
        end_token=_choice(environment, "STAND_IN_END_TOKEN", ("auto", "in", "out")),
        kv_tokens=int(environment.get("STAND_IN_KV_TOKENS", "65536")),
        record=_path(environment, "STAND_IN_RECORD"),
    )


def _read_faults(text: str) -> dict[str, str]:
    faults = dict(part.strip().partition("=")[::2] for part in text.split(",") if part.strip())
    if unknown := faults.keys() - _FAULTS:
        raise ValueError(f"STAND_IN_FAULT must name some of {', '.join(sorted(_FAULTS))}, got {', '.join(unknown)}")
    return faults


def _path(environment: Mapping[str, str], name: str) -> Path | None:
    return Path(environment[name]) if environment.get(name) else None


def _choice(environment: Mapping[str, str], name: str, choices: tuple[str, ...], default: str | None = None) -> str:
    value = environment.get(name, default or choices[0])
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value

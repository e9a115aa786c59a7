"""Settings of the model repository."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class ControlMode(StrEnum):
    """Which models are loaded, and when (`--model-control-mode`)."""

    NONE = "none"
    """All models, once, at the start."""
    POLL = "poll"
    """All models, scanned for changes every `--repository-poll-secs`."""
    EXPLICIT = "explicit"
    """The models that `--load-model` names, then those that clients load."""


@dataclass(frozen=True, slots=True)
class RepositorySettings:
    """How a repository reads and loads models.

    More `num_parallel_loads` shorten the start, and cost memory and processors meanwhile. A version that fails is tried
    again `num_load_retries` times. Remote stores are mirrored in `cache_path`, where the next server finds what it need
    not download again; None is a temporary folder. `has_namespaces`: models of one name in several repositories all
    serve. Without polls, a model in a store is loaded once it has not changed for `store_rest_s`. A model that has
    configs/NAME.pbtxt for `config_name` is configured by it.
    """

    num_parallel_loads: int = 4
    num_load_retries: int = 0
    cache_path: Path | None = None
    has_namespaces: bool = False
    store_rest_s: float = 1.0
    config_name: str = ""

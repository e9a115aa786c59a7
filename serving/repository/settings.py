"""What the repository says of its models."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class ControlMode(StrEnum):
    """Who decides what is loaded (`--model-control-mode`)."""

    NONE = "none"
    """Everything, once, at the start."""
    POLL = "poll"
    """What lies there, looked at every `--repository-poll-secs`."""
    EXPLICIT = "explicit"
    """What `--load-model` names, then what clients ask for."""


@dataclass(frozen=True, slots=True)
class RepositorySettings:
    """How a repository reads and loads.

    More `num_parallel_loads` shorten the start and cost memory and processors meanwhile. `num_load_retries` of each
    version that fails. `cache_path` is where remote stores are mirrored, None a temporary folder; what lies there is
    not downloaded again by the next server. `has_namespaces`: models of one name in several repositories all serve.
    `store_rest_s`: how long a model in a store must not have changed to be loaded, where polls do not tell.
    """

    num_parallel_loads: int = 4
    num_load_retries: int = 0
    cache_path: Path | None = None
    has_namespaces: bool = False
    store_rest_s: float = 1.0

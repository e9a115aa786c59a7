"""Finds where an engine publishes the events of its prefix cache, which Dynamo's router reads."""

from dataclasses import dataclass

import msgspec

from sluice.engine.config import EngineConfig, Runtime
from sluice.errors import invalid

_SETTING = "kv_events_config"


@dataclass(frozen=True, slots=True)
class KvEvents:
    """A ZeroMQ socket with events in vLLM's format. `endpoint` is an address to connect to."""

    endpoint: str
    topic: str = ""


class _VllmEvents(msgspec.Struct):
    """vLLM's `KVEventsConfig`, the part that a subscriber needs."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    topic: str = ""


def find_kv_events(config: EngineConfig) -> KvEvents | None:
    """Return where the engine of `config` publishes events; None where it publishes none, so that the router estimates
    by the requests it has sent. Raises INVALID for a setting of vLLM that cannot be read."""
    if config.kv_events_endpoint is not None:
        return KvEvents(_reachable(config.kv_events_endpoint), config.kv_events_topic)
    if config.runtime is not Runtime.VLLM or _SETTING not in config.runtime_settings:
        return None
    try:
        events = msgspec.json.decode(config.runtime_settings[_SETTING], type=_VllmEvents)
    except msgspec.DecodeError as error:
        raise invalid(_SETTING, f"{_SETTING} must be vLLM's KVEventsConfig as JSON: {error}") from None
    if not events.enable_kv_cache_events or events.publisher != "zmq":
        return None
    return KvEvents(_reachable(events.endpoint), events.topic)


def _reachable(endpoint: str) -> str:
    """Return where to connect to what is bound at `endpoint` on this machine."""
    return endpoint.replace("//*:", "//127.0.0.1:")

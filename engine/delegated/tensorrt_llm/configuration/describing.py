"""Arguments of an LLM as one would write them in Python."""

import re
from enum import Enum
from typing import Any

_SECRET = re.compile(r"token(?!s|iz|_id|_length)|secret|password|api_?key|credential", re.IGNORECASE)
_WITHHELD = frozenset({"env_overrides"})


def described(cls: Any, arguments: dict[str, Any]) -> str:
    """`LLM(model='...', kv_cache_config=KvCacheConfig(max_tokens=64))`; what looks like a secret is left out."""
    return _call(getattr(cls, "__name__", str(cls)), arguments)


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={_shown(key, value)}' for key, value in arguments.items())})"


def _shown(key: str, value: Any) -> str:
    if value is not None and (key in _WITHHELD or (isinstance(value, str) and _SECRET.search(key))):
        return "'...'"
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    given = _given(value)
    return repr(value) if given is None else _call(type(value).__name__, given)


def _given(value: Any) -> dict[str, Any] | None:
    """The fields that an object of the library's was made with; None for plain values."""
    names = getattr(value, "model_fields_set", None)
    if names is not None:
        return {name: getattr(value, name) for name in sorted(names)}
    names = getattr(value, "__dataclass_fields__", None)
    return None if names is None else {name: getattr(value, name) for name in names}

"""Text that UTF-8 cannot encode, such as the name of a file in another encoding, which Python reads as surrogates."""

from typing import Any

import msgspec


def escape(value: Any) -> Any:
    """Return a message, or a part of one, in which such characters are written as escapes: `caf\\udce9`."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, msgspec.Struct):
        fields = {name: escape(getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    if isinstance(value, dict):
        return {escape(key): escape(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(escape, value))
    return value

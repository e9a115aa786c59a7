"""Reads YAML, and JSON, which is YAML too."""

from typing import Any


def load_yaml(text: str | bytes, loader: Any = None) -> Any:
    """Return the value of a document, read by `loader`, PyYAML's SafeLoader without one. Raises yaml.YAMLError, also
    for what PyYAML itself raises something else for: impossible dates and numbers, deep nesting."""
    import yaml  # slow to import, and few processes read any

    try:
        return yaml.load(text, loader or yaml.SafeLoader)
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else f"a value is none: {error}"
        raise yaml.YAMLError(reason) from error

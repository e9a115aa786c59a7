"""Which versions of TensorRT-LLM have what, in words for error messages."""

from packaging.version import Version

MINIMUM = Version("1.2")
"""Before it scheduling parameters, cache salts and several settings have other names or are not there."""

LAST_WITH_ENGINES = Version("1.2")
"""The release series after which compiled engines cannot be loaded."""
FIRST_WITHOUT_ENGINES = "1.3"


def is_before(version: Version, other: str) -> bool:
    """Release numbers are compared: 1.3.0rc5 counts as 1.3, whose features it has."""
    return version.release < Version(other).release


def is_in(version: Version, since: str, until: str) -> bool:
    """Whether `version` is one from `since` on and before `until`; "" is no bound."""
    if since and is_before(version, since):
        return False
    return not until or is_before(version, until)


def those_with(since: str, until: str) -> str:
    """The versions in words: "TensorRT-LLM 1.3 or later has it"."""
    if since and until:
        return f"TensorRT-LLM from {since} on and before {until} has it"
    if since:
        return f"TensorRT-LLM {since} or later has it"
    return f"TensorRT-LLM before {until} has it"

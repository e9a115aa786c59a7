"""What a path names."""

from typing import NamedTuple

from gateway.v2.version import parse_version

_LONGEST = 4000
"""Digits of a version that are read and repeated in an error; Python refuses to read more than 4300."""


class Target(NamedTuple):
    """A model and its version as they stand in the path, or a shared memory region or repository. "" where absent."""

    name: str = ""
    version: str = ""

    @property
    def version_number(self) -> int:
        """LATEST where no version is named. Raises INVALID for one that no number of 64 bits holds."""
        return parse_version(self.version[:_LONGEST])

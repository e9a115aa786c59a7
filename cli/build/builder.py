"""The part of `sluice build` that depends on the runtime. `plan.py` registers a builder for each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sluice.cli.build.options import BuildOptions
from sluice.cli.build.source import SourceCheckpoint
from sluice.cli.build.steps import BuildStep
from sluice.engine.model_folder import ModelFormat


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RuntimeBuilder:
    """Builds models for one runtime. A function's source is None before the checkpoint exists."""

    backend: str
    """The `backend` of the model's config.pbtxt."""
    check: Callable[[BuildOptions, SourceCheckpoint | None], None]
    """Raises UsageError for what the runtime or the checkpoint cannot do."""
    is_required: Callable[[BuildOptions], bool]
    """Whether no other runtime has what the options request."""
    built_format: Callable[[BuildOptions, SourceCheckpoint | None], ModelFormat]
    """Returns the format of the model in the version's folder."""
    steps: Callable[[BuildOptions, SourceCheckpoint, Path, Path], Iterator[BuildStep]]
    """Yields the steps that make the version's folder, the first path, of the checkpoint. The second path is a folder
    for temporary files."""
    parameters: Callable[[BuildOptions, ModelFormat], dict[str, str]]
    """Returns parameters of config.pbtxt that depend on the runtime; an empty text leaves one out."""
    title: Callable[[BuildOptions], str]
    """Returns the runtime's name, with the version that is built for where that matters."""
    library_version: Callable[[BuildOptions], str | None]
    """Returns the version of the library that builds, for the manifest."""

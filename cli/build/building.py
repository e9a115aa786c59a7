"""Runs a build with its progress on a console, or writes it as a shell script (`--dry-run`)."""

import json
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from sluice import __version__
from sluice.cli.build.configs import RepositoryNames
from sluice.cli.build.options import BuildError, BuildOptions
from sluice.cli.build.output import check_output, check_space, publish, staging
from sluice.cli.build.plan import (
    TOKENIZER_DIRECTORY,
    VERSION,
    BuildPaths,
    BuildPlan,
    choose_build_runtime,
    choose_names,
    make_plan,
    plan_fetch,
    work_folder,
)
from sluice.cli.build.source import BuildSource, SourceCheckpoint, find_source, read_checkpoint
from sluice.cli.build.steps import Advance, BuildStep, ConvertStep, CopyStep, ToolStep, shell_comment, shell_quote
from sluice.cli.checkpoint_files import CONFIG, MANIFEST, sha256_of, tokenizer_file
from sluice.cli.gpus import read_driver
from sluice.cli.terminal import format_size
from sluice.engine.config import Runtime
from sluice.engine.model_folder import ModelFormat
from sluice.gateway.checkpoint import is_hub_id
from sluice.machine import num_gpus

_NUM_PUBLISH_STEPS = 1


def build(options: BuildOptions, console: Console) -> tuple[str, ...]:
    """Make the repository, and return the names of its new models.

    Raises UsageError, BuildError, SluiceError or OSError.
    """
    source = find_source(options.checkpoint, is_dry=False)
    models, runtime = choose_names(options, source), choose_build_runtime(options, source)
    check_output(options.output, models.all, is_forced=options.is_forced)
    with _exit_on_signals(), staging(options.output) as folder:
        paths = BuildPaths(folder / "models", folder / "work", options.output)
        paths.models.mkdir()
        paths.work.mkdir()
        progress = StepProgress(console)
        _make(options, source, runtime, models, paths, progress)
        progress.run(_PublishStep("move the models into the repository", paths, models, folder / "replaced"))
    return models.all


def make_script(options: BuildOptions) -> str:
    """Return the build as a POSIX shell script. Raises UsageError."""
    source = find_source(options.checkpoint, is_dry=True)
    models, runtime = choose_names(options, source), choose_build_runtime(options, source)
    check_output(options.output, models.all, is_forced=options.is_forced)
    paths = BuildPaths(options.output, work_folder(options.output), options.output)
    fetching, checkpoint = plan_fetch(options, source, paths)
    plan = make_plan(options, checkpoint, runtime, models, paths)
    return "\n".join(_script_lines(options, source, fetching, plan, paths)) + "\n"


def summary_lines(options: BuildOptions, models: Sequence[str]) -> Iterator[str]:
    """Yield the models that were built with their sizes, and the commands to run next."""
    width = max(map(len, models))
    for name in models:
        files = [file for file in (options.output / name).rglob("*") if file.is_file()]
        yield f"  {name:<{width}}  {format_size(sum(file.stat().st_size for file in files)):>10}"
    yield ""
    yield from _next_commands(options.output)


def _make(
    options: BuildOptions,
    source: BuildSource,
    runtime: Runtime,
    models: RepositoryNames,
    paths: BuildPaths,
    progress: "StepProgress",
) -> None:
    """Make all models, and their manifest, in `paths.models`."""
    fetching, checkpoint = plan_fetch(options, source, paths)
    plan = make_plan(options, checkpoint, runtime, models, paths)
    _check_machine((*fetching, *plan.steps), paths)
    progress.expect(len(fetching) + len(plan.steps) + _NUM_PUBLISH_STEPS)
    for step in fetching:
        progress.run(step)
    if fetching:  # the checkpoint exists only now, so its files can be checked and planned with only now
        checkpoint = read_checkpoint(checkpoint.path, checkpoint.origin)
        choose_build_runtime(options, checkpoint)
        plan = make_plan(options, checkpoint, runtime, models, paths)
        _check_machine(plan.steps, paths)
    for step in plan.steps:
        progress.run(step)
    tools = [step for step in (*fetching, *plan.steps) if isinstance(step, ToolStep)]
    write_manifest(make_manifest(options, source, checkpoint, plan, paths, tools), paths.models / models.model)


@dataclass(frozen=True, slots=True)
class _PublishStep(BuildStep):
    """The last step of a build: moves the models into the repository."""

    paths: BuildPaths
    models: RepositoryNames
    replaced: Path

    def script(self) -> str:
        raise AssertionError("the steps of a script write to the repository itself")

    def run(self, advance: Advance) -> None:
        publish(self.paths.models, self.paths.published, self.models.all, self.replaced)


def _check_machine(steps: Sequence[BuildStep], paths: BuildPaths) -> None:
    """Raises BuildError for a missing tool or GPU, UsageError for too little space."""
    tools = [step for step in steps if isinstance(step, ToolStep)]
    missing = [tool for tool in tools if not tool.is_available]
    if missing:
        raise BuildError(paths.to_published(_missing_tools_message(missing, tools)))
    if any(tool.needs_gpu for tool in tools) and not num_gpus():
        first = next(tool for tool in tools if tool.needs_gpu)
        raise BuildError(
            f"there is no NVIDIA GPU here, and one is needed to {first.purpose}; run the commands of --dry-run on a "
            "machine that has one"
        )
    check_space(paths.models, steps)


def _missing_tools_message(missing: Sequence[ToolStep], tools: Sequence[ToolStep]) -> str:
    lines = [f"{missing[0].requires} is not here, and needed to {missing[0].purpose}. To have it:"]
    lines += dict.fromkeys(f"  {tool.install_command}" for tool in missing)
    lines.append("What would be run (all of it: --dry-run):")
    for tool in tools:
        lines += [f"  {line}" for line in (f"# {tool.purpose}", *tool.script().splitlines())]
    return "\n".join(lines)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, as Ctrl-C is an exception, so that the staging folder is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup ignores SIGHUP, and so does the build then
            signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


class StepProgress:
    """Runs steps and prints a line for each. On a terminal it also draws a bar, which goes when its step is done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_steps = 0
        self._num_started = 0

    def expect(self, num_steps: int) -> None:
        """Set the number of steps that will be run."""
        self._num_steps = num_steps

    def run(self, step: BuildStep) -> None:
        """Run a step. Raises what the step raises."""
        self._num_started += 1
        self._console.print(f"[{self._num_started}/{self._num_steps}] {step.purpose}", markup=False, highlight=False)
        with self._bar(step) as advance:
            step.run(advance)

    @contextmanager
    def _bar(self, step: BuildStep) -> Iterator[Advance]:
        """Draw a bar of bytes for steps that count them, else the elapsed time. Tools print their own progress."""
        if isinstance(step, ToolStep) or not self._console.is_terminal:
            yield lambda num_bytes: None
            return
        counts_bytes = isinstance(step, CopyStep | ConvertStep)
        columns = _byte_columns() if counts_bytes else (SpinnerColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("", total=(step.size_bytes() or None) if counts_bytes else None)
            yield lambda num_bytes: progress.advance(task, num_bytes)


def _byte_columns() -> tuple[ProgressColumn, ...]:
    return (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeElapsedColumn())


def _script_lines(
    options: BuildOptions, source: BuildSource, fetching: Sequence[BuildStep], plan: BuildPlan, paths: BuildPaths
) -> Iterator[str]:
    yield "#!/bin/sh"
    title = f"{options.checkpoint} ({source.description}) -> {paths.published}, for {plan.builder.title(options)}"
    yield shell_comment(f"{title}; models: {', '.join(plan.names.all)}")
    yield "set -e"
    steps = (*fetching, *plan.steps)
    has_work_folder = any(str(paths.work) in step.script() for step in steps)
    yield from _missing_tool_lines(tuple(step for step in steps if isinstance(step, ToolStep)))
    if has_work_folder:
        yield f"mkdir -p {shell_quote(paths.work)}"
    for number, step in enumerate(steps, 1):
        yield ""
        yield shell_comment(f"{number}/{len(steps)}: {step.purpose}")
        yield step.script()
    if has_work_folder:
        yield ""
        yield "# remove the temporary files"
        yield f"rm -r {shell_quote(paths.work)}"
    yield ""
    yield "# then"
    yield from (shell_comment(line) for line in _next_commands(paths.published))


def _next_commands(repository: Path) -> tuple[str, ...]:
    """Return the commands that check and serve a built repository."""
    commands = ("doctor", "repository check", "serve --model-repository")
    return tuple(f"sluice {command} {shell_quote(repository)}" for command in commands)


def _missing_tool_lines(tools: Sequence[ToolStep]) -> Iterator[str]:
    missing = {tool.install_command: tool.requires for tool in tools if not tool.is_available}
    if missing:
        yield "#"
        yield "# Not here, and needed by what follows:"
        yield from (f"#   {requires}: {install}" for install, requires in missing.items())


FORMAT = 1
"""Version of the format. It is raised when a field changes its meaning."""


def make_manifest(
    options: BuildOptions,
    source: BuildSource,
    checkpoint: SourceCheckpoint,
    plan: BuildPlan,
    paths: BuildPaths,
    tools: Iterable[ToolStep],
) -> dict[str, Any]:
    """Return the manifest of the model that was built in `paths`.

    `source` is what CHECKPOINT names, `checkpoint` what was fetched of it, and `tools` are the commands that were run.
    """
    is_engine = plan.format is ModelFormat.TENSORRT_LLM_ENGINE
    model = paths.models / plan.names.model
    tokenizer = tokenizer_file(model / VERSION, model / TOKENIZER_DIRECTORY)
    return {
        "format": FORMAT,
        "built_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "sluice_version": __version__,
        "name": plan.names.model,
        "models": list(plan.names.all),
        "runtime": plan.runtime.value,
        "runtime_version": plan.builder.library_version(options),
        "model_format": plan.format.value,
        "compute_capability": _compute_capability() if is_engine and options.is_compiled else None,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "quantization": options.quantization if options.quantization != "none" else checkpoint.quantized_by or "none",
        "dtype": options.dtype.value,
        "kv_cache_dtype": options.kv_cache_dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_beam_width": options.max_beam_width,
        "source": _source_fields(options, source, checkpoint),
        "tokenizer_file": tokenizer.name if tokenizer else None,
        "tokenizer_sha256": sha256_of(tokenizer) if tokenizer else None,
        "commands": [paths.to_published(tool.script()) for tool in tools],
    }


def write_manifest(fields: dict[str, Any], model: Path) -> None:
    (model / MANIFEST).write_text(json.dumps(fields, indent=2) + "\n")


def _source_fields(options: BuildOptions, source: BuildSource, checkpoint: SourceCheckpoint) -> dict[str, Any]:
    """Describe the source. `revision` is the commit of a hub model, which names its folder in the hub's cache."""
    is_from_hub = not Path(options.checkpoint).exists() and is_hub_id(options.checkpoint)
    config = checkpoint.path / CONFIG
    return {
        "checkpoint": options.checkpoint if is_from_hub else str(Path(options.checkpoint).absolute()),
        "kind": source.format.value if isinstance(source, SourceCheckpoint) else "nemo",
        "revision": checkpoint.path.name if is_from_hub else None,
        "config_sha256": sha256_of(config) if config.is_file() else None,
    }


def _compute_capability() -> str | None:
    """Return the compute capability of the first GPU, as "9.0"; None where NVML does not report it."""
    gpus = read_driver().gpus
    return str(gpus[0].capability) if gpus and gpus[0].capability else None

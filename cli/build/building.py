"""Runs a build."""

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from engine.config import Runtime
from sluice.machine import num_gpus
from cli.build.arguments import Options
from cli.build.failures import BuildError
from cli.build.manifest import manifest, write_manifest
from cli.build.plan import Places, choose, fetch_steps, make_plan, names, work_folder
from cli.build.progress import Watch
from cli.build.publishing import check_place, publish, staging
from cli.build.script import next_commands, script
from cli.build.source import Source, checkpoint_at, find_source
from cli.build.space import check_space, size_text
from cli.build.steps import Step, Tool
from cli.build.texts import Names

_NUM_OTHER_STEPS = 1
"""The one that moves the models into the repository."""


def dry_run(options: Options) -> str:
    """The script. Raises AskedError."""
    source = find_source(options.checkpoint, is_dry=True)
    models, runtime = names(options, source), choose(options, source)
    check_place(options.output, models.all, is_forced=options.is_forced)
    places = Places(options.output, work_folder(options.output), options.output)
    fetching, checkpoint = fetch_steps(options, source, places)
    plan = make_plan(options, checkpoint, runtime, models, places)
    what = f"{options.checkpoint} ({source.description})"
    return "\n".join(script(options, fetching, plan, places, what)) + "\n"


def build(options: Options, console: Console) -> tuple[str, ...]:
    """Make the repository, and return the names of its new models.

    Raises AskedError, BuildError, SluiceError or OSError.
    """
    source = find_source(options.checkpoint, is_dry=False)
    models, runtime = names(options, source), choose(options, source)
    check_place(options.output, models.all, is_forced=options.is_forced)
    with _ended_by_signals(), staging(options.output) as folder:
        places = Places(folder / "models", folder / "work", options.output)
        places.root.mkdir()
        places.work.mkdir()
        watch = Watch(console)
        _make(options, source, runtime, models, places, watch)
        watch.run(_Publish(places, models, folder / "replaced"))
    return models.all


def _make(options: Options, source: Source, runtime: Runtime, models: Names, places: Places, watch: Watch) -> None:
    """Everything under `places.root`."""
    fetching, checkpoint = fetch_steps(options, source, places)
    plan = make_plan(options, checkpoint, runtime, models, places)
    _check_machine((*fetching, *plan.steps), places)
    watch.expect(len(fetching) + len(plan.steps) + _NUM_OTHER_STEPS)
    for step in fetching:
        watch.run(step)
    if fetching:  # now it is seen what the steps go out from
        checkpoint = checkpoint_at(checkpoint.path, checkpoint.origin)
        choose(options, checkpoint)
        plan = make_plan(options, checkpoint, runtime, models, places)
        _check_machine(plan.steps, places)
    for step in plan.steps:
        watch.run(step)
    tools = [step for step in (*fetching, *plan.steps) if isinstance(step, Tool)]
    write_manifest(manifest(options, source, checkpoint, plan, places, tools), places.root / models.model)


def told(options: Options, models: Sequence[str]) -> Iterator[str]:
    """What was built, and what to do with it."""
    width = max(map(len, models))
    for name in models:
        files = [file for file in (options.output / name).rglob("*") if file.is_file()]
        yield f"  {name:<{width}}  {size_text(sum(file.stat().st_size for file in files)):>10}"
    yield ""
    yield from next_commands(options.output)


class _Publish:
    """The models into the repository."""

    purpose = "move the models into the repository"

    def __init__(self, places: Places, models: Names, aside: Path) -> None:
        self._places, self._models, self._aside = places, models, aside

    def script(self) -> str:
        raise AssertionError("a script's steps write to where models are served")

    def size_bytes(self) -> int:
        return 0

    def run(self, advance: object) -> None:
        publish(self._places.root, self._places.published, self._models.all, self._aside)


def _check_machine(steps: Sequence[Step], places: Places) -> None:
    """Raises BuildError for tools that are not there, AskedError for too little space."""
    tools = [step for step in steps if isinstance(step, Tool)]
    missing = [tool for tool in tools if not tool.is_there]
    if missing:
        raise BuildError(places.lasting(_without(missing, tools)))
    if any(tool.wants_gpu for tool in tools) and not num_gpus():
        wanting = next(tool for tool in tools if tool.wants_gpu)
        raise BuildError(
            f"there is no NVIDIA GPU here, and one is needed to {wanting.purpose}; run the commands of --dry-run on a "
            "machine that has one"
        )
    check_space(places.root, steps)


def _without(missing: Sequence[Tool], tools: Sequence[Tool]) -> str:
    lines = [f"{missing[0].needs} is not here, and needed to {missing[0].purpose}. To have it:"]
    lines += dict.fromkeys(f"  {tool.had_by}" for tool in missing)
    lines.append("What would be run (all of it: --dry-run):")
    for tool in tools:
        lines += [f"  {line}" for line in (f"# {tool.purpose}", *tool.script().splitlines())]
    return "\n".join(lines)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """As by Ctrl-C: what is half made is taken away."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)

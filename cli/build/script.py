"""A plan as a shell script, for `--dry-run`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.config import Runtime
from cli.build.arguments import Options
from cli.build.plan import Places, Plan
from cli.build.steps import Step, Tool, comment, quoted
from cli.build.tensorrt_llm import library_version


def script(options: Options, fetching: Sequence[Step], plan: Plan, places: Places, what: str) -> Iterator[str]:
    """Its lines, to be run by a POSIX shell."""
    yield "#!/bin/sh"
    yield comment(f"{what} -> {places.published}, for {_runtime(options, plan)}; models: {', '.join(plan.names.all)}")
    yield "set -e"
    steps = (*fetching, *plan.steps)
    has_work = any(str(places.work) in step.script() for step in steps)
    yield from _needs(tuple(step for step in steps if isinstance(step, Tool)))
    if has_work:
        yield f"mkdir -p {quoted(places.work)}"
    for number, step in enumerate(steps, 1):
        yield ""
        yield comment(f"{number}/{len(steps)}: {step.purpose}")
        yield step.script()
    if has_work:
        yield ""
        yield "# what is not wanted any more"
        yield f"rm -r {quoted(places.work)}"
    yield ""
    yield "# then"
    yield from (comment(line) for line in next_commands(places.published))


def next_commands(repository: Path) -> tuple[str, ...]:
    """What one does with a repository that is built."""
    commands = ("doctor", "repository check", "serve --model-repository")
    return tuple(f"sluice {command} {quoted(repository)}" for command in commands)


def _runtime(options: Options, plan: Plan) -> str:
    if plan.runtime is Runtime.OPENVINO:
        return "OpenVINO"
    return f"TensorRT-LLM {library_version(options)}"


def _needs(tools: Sequence[Tool]) -> Iterator[str]:
    missing = {tool.had_by: tool.needs for tool in tools if not tool.is_there}
    if missing:
        yield "#"
        yield "# Not here, and needed by what follows:"
        yield from (f"#   {needs}: {had_by}" for had_by, needs in missing.items())

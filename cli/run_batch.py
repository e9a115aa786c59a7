"""`sluice run-batch`: answers the requests of a file in OpenAI's batch format, without a server."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console

from sluice.cli.errors import CommandError, reports_errors
from sluice.cli.progress import show_progress
from sluice.cli.serve import start_log
from sluice.errors import SluiceError
from sluice.gateway.checkpoint import find_checkpoint, model_name
from sluice.gateway.options.command_line import add_options
from sluice.gateway.options.config import GROUPS, ServeConfig, read_config
from sluice.gateway.options.option import FAILED, USAGE_ERROR, OneLineParser, OptionError
from sluice.gateway.options.responses import NONE, ResponsesOptions

if TYPE_CHECKING:
    from sluice.gateway.answers.batches.line_run import AnswerLine
    from sluice.gateway.answers.batches.lines import CheckedFile
    from sluice.gateway.answers.batches.results import ResultFiles
    from sluice.gateway.plane.data_plane import Plane

_GROUPS = (
    *("model", "repository", "instances", "scheduling", "cache", "speculation", "tensorrt_llm", "requests", "logging"),
)
"""Groups of the options of `sluice serve` that matter without a server."""
_MOST_RETRIES = 10
"""Most retries of a request that the engine has no room for. More of them mean that the engine is gone."""
_SHOWN_PROBLEMS = 20
_DESCRIPTION = """\
Answer the requests of a file in OpenAI's batch format, without a server.

Each line of INPUT is one request:

  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"model": "rill", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 50}}

url is /v1/chat/completions, /v1/completions, /v1/responses (which are not stored), /v1/embeddings, /v1/rerank or
/v1/score. Each line of the output has the custom_id and the response, in the order in which they were finished.
Requests that failed are in the file of errors. All lines are checked before the model is loaded.

What is in either file counts as finished: the same command goes on after an interruption, even kill -9. To try
failed requests again, delete the file of errors.
"""
_EPILOG = """\
Where no --served-model-name and no repository is given, MODEL answers under the name that the lines give. Options
can be set in the environment too, as for `sluice serve`: SLUICE_MAX_NUM_SEQS=64. The log has warnings and errors;
--log-level info shows more.

examples:
  sluice run-batch requests.jsonl -o answers.jsonl                        the bundled model
  sluice run-batch requests.jsonl -o answers.jsonl --model /models/Qwen3-0.6B --kv-cache-memory 2G
  sluice run-batch texts.jsonl -o vectors.jsonl --model-repository /models   encoders of a repository

Exit codes: 0 when every request has an answer, 1 when some failed or the run stopped, 2 for bad options.
"""


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The files of a run."""

    requests: Path
    output: Path
    errors: Path


@reports_errors("sluice run-batch", OSError, ValueError)
def command(argv: list[str]) -> int:
    """Answer the requests of a file in OpenAI's batch format, without a server."""
    paths, config = _parse(argv)
    from sluice.gateway.answers.batches.lines import check_file  # imported late: bad options should be reported fast

    try:
        found = check_file(paths.requests, sys.maxsize)
    except OSError as error:
        raise CommandError(f"{paths.requests} cannot be read: {error.strerror}", USAGE_ERROR) from None
    for problem in found.problems[:_SHOWN_PROBLEMS]:
        place = paths.requests if problem.line is None else f"{paths.requests}:{problem.line}"
        sys.stderr.write(f"sluice run-batch: error: {place}: {problem.message}\n")
    if found.problems:
        return FAILED
    checkpoint = _find_model(config)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(paths, found, config, checkpoint))
    except KeyboardInterrupt:
        sys.stderr.write("sluice run-batch: stopped; the same command goes on from here\n")
        raise
    except SluiceError as error:
        raise CommandError(f"{error}; the same command goes on from here") from None


def _parse(argv: list[str]) -> tuple[RunPaths, ServeConfig]:
    """Parse the command line. Raises OptionError; exits where it cannot be understood."""
    parser = OneLineParser(
        prog="sluice run-batch",
        usage="sluice run-batch INPUT -o OUTPUT [--model MODEL] [OPTIONS]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("INPUT", nargs="?", help="file with a request a line")
    parser.add_argument("-i", "--input-file", metavar="INPUT", help="the same, as vLLM names it")
    parser.add_argument("-o", "--output-file", metavar="OUTPUT", required=True, help="file for the responses")
    parser.add_argument("--errors-file", metavar="ERRORS", help="file for what failed. Default: OUTPUT.errors.jsonl")
    add_options(parser, (GROUPS[name] for name in _GROUPS), renamed={"MODEL": "--model"})
    flags = vars(parser.parse_args(argv))
    given = [each for each in (flags.pop("INPUT"), flags.pop("input_file")) if each is not None]
    if len(given) != 1:
        raise OptionError("INPUT is required, once: the file with the requests")
    output, errors = Path(flags.pop("output_file")), flags.pop("errors_file")
    paths = RunPaths(Path(given[0]), output, Path(errors or f"{output}.errors.jsonl"))
    if len({os.path.realpath(path) for path in (paths.requests, paths.output, paths.errors)}) < 3:
        raise OptionError("INPUT, OUTPUT and ERRORS must be three files")
    flags["--log-level"] = flags["--log-level"] or "warning"  # lines of information would break the progress bar
    config = read_config({flag: value for flag, value in flags.items() if value is not None})
    config = replace(config, responses=ResponsesOptions(store=NONE))
    start_log(config.logging)
    return paths, config


def _find_model(config: ServeConfig) -> Path | None:
    if config.model.path is None and config.repository.paths:
        return None
    return find_checkpoint(config.model.path, "--model", config.tensorrt_llm.engine_python)


def _named(config: ServeConfig, checkpoint: Path | None, found: "CheckedFile") -> ServeConfig:
    """Return the configuration with the name that the lines give to MODEL, where they give one and no option does."""
    names = {model for _, model in found.targets}
    is_named = config.model.served_model_name or config.repository.paths or config.tensorrt_llm.lora_modules
    if checkpoint is None or is_named or len(names) != 1:
        return config
    name = names.pop()
    if name != (own := model_name(checkpoint)):
        sys.stderr.write(f"sluice run-batch: the requests name the model {name!r}; {own} answers them\n")
    return replace(config, model=replace(config.model, served_model_name=name))


@dataclass(slots=True)
class RunProgress:
    """Counts requests. `num_before` were finished by an earlier run."""

    noun = "requests"

    num_planned: int
    results: "ResultFiles"
    num_before: int = 0
    began_s: float = field(default_factory=time.monotonic)

    @property
    def num_done(self) -> int:
        return self.results.counts.total

    @property
    def per_s(self) -> float:
        return (self.num_done - self.num_before) / max(time.monotonic() - self.began_s, 1e-3)

    def pace(self) -> str:
        """Return the speed and what failed."""
        failed = self.results.counts.failed
        return f"{self.per_s:,.1f} requests/s" + (f", {failed} failed" if failed else "")


async def _run(paths: RunPaths, found: "CheckedFile", config: ServeConfig, checkpoint: Path | None) -> int:
    """Answer what is not finished. Raises SluiceError, OSError, and ValueError for files of something else."""
    from sluice.gateway.answers.batches.results import ResultFiles

    results = ResultFiles(paths.output, paths.errors)
    try:
        await results.open()
        if foreign := results.finished - found.ids.keys():
            text = f"{paths.output} has results of requests that {paths.requests} does not have, such as"
            raise OptionError(f"{text} {min(foreign)!r}; name another file")
        progress = RunProgress(found.num_requests, results, results.counts.total)
        if progress.num_done < found.num_requests:
            await _ask(paths, found, _named(config, checkpoint, found), checkpoint, progress)
        counts = results.counts
        before = f", {progress.num_before} of them by an earlier run" if progress.num_before else ""
        failed = f", {counts.failed} failed (see {paths.errors})" if counts.failed else ""
        text = f"{paths.output}: {counts.completed} of {found.num_requests} requests answered{before}{failed}"
        sys.stdout.write(f"{text}; {progress.per_s:,.1f} requests/s\n")
        return FAILED if counts.failed else 0
    finally:
        await results.close()


async def _ask(
    paths: RunPaths, found: "CheckedFile", config: ServeConfig, checkpoint: Path | None, progress: RunProgress
) -> None:
    from sluice.gateway.answers.batches.line_run import LineRun
    from sluice.gateway.answers.batches.lines import pending_lines
    from sluice.gateway.answers.batches.places import PlaceKeeper, measure_capacity
    from sluice.gateway.answers.batches.records import new_id
    from sluice.gateway.answers.batches.service import check_model

    console = Console(stderr=True, soft_wrap=True)
    async with AsyncExitStack() as stack:
        with console.status("loading the model"):
            plane, answer = await stack.enter_async_context(_embedded(config, checkpoint))
        for (url, model), line in found.targets.items():
            try:
                check_model(plane, url, model)
            except SluiceError as error:
                raise OptionError(f"{paths.requests}:{line}: {error.message}") from None
        places = PlaceKeeper(partial(measure_capacity, plane, is_alone=True))
        results = progress.results
        run = LineRun(new_id("batch_"), "", None, answer, places, results, lambda _: None, _MOST_RETRIES)
        progress.began_s = time.monotonic()
        async with show_progress(progress, console):
            await run.run(pending_lines(paths.requests, results.finished))


@asynccontextmanager
async def _embedded(config: ServeConfig, checkpoint: Path | None) -> "AsyncIterator[tuple[Plane, AnswerLine]]":
    """Load the models as `sluice serve` does, without ports. Raises SluiceError."""
    from sluice.gateway.assembly import load_model, make_application, make_server
    from sluice.gateway.model_engine import make_model_engine

    server = make_server(config)
    engine = None if checkpoint is None else make_model_engine(config, checkpoint)
    try:
        if engine is not None and checkpoint is not None:
            starting = asyncio.create_task(engine.start())
            try:
                await load_model(server, config, checkpoint, engine, starting)
            finally:
                starting.cancel()
                await asyncio.wait((starting,))
        await server.plane.repository.start(config.repository.load)
        server.plane.health.begin_serving()
        yield server.plane, make_application(server, config).answer
    finally:
        await server.rooms.close()
        if engine is not None:
            await engine.stop()

"""The command `sluice tune`: its options, and where the results go."""

import argparse
import asyncio
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from rich.console import Console

from sluice.gateway.options.option import FAILED, USAGE_ERROR
from sluice.load.config import LoadConfigError, Workload
from sluice.tuning.driving import CONCURRENCY, REQUEST_RATE, Drive
from sluice.tuning.errors import TuneError
from sluice.tuning.figures import Goal, Objective
from sluice.tuning.options import LOADS_LIVE, LOADS_SIMULATED, TRIALS_LIVE, TRIALS_SIMULATED, parser
from sluice.tuning.space import Dimension, Value, parse_values

if TYPE_CHECKING:
    from sluice.tuning.driving import TunePlan
    from sluice.tuning.run import Tuning

INTERRUPTED = 130
_WIDTH_OF_FILES = 200


def command(argv: list[str]) -> int:
    """Find the settings and the load with which a model serves most within bounds, and write them."""
    place = argv.index("--") if "--" in argv else len(argv)
    arguments = parser().parse_args(argv[:place])
    arguments.serve = argv[place + 1 :]
    shown = shlex.join(["sluice", "tune", *argv])
    try:
        plan = _plan(arguments)
    except (TuneError, LoadConfigError) as error:
        return _fail(str(error), USAGE_ERROR)
    try:
        tuning = _run(plan, is_quiet=arguments.quiet)
    except TuneError as error:
        return _fail(str(error), FAILED)
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        return _fail("Optuna is not installed: pip install 'sluice[tune]'", FAILED)
    except KeyboardInterrupt:
        sys.stderr.write(f"sluice tune: interrupted; the same command goes on with {plan.folder}\n")
        return INTERRUPTED
    return _finish(tuning, shown)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"sluice tune: error: {message}\n")
    return code


def _run(plan: "TunePlan", *, is_quiet: bool) -> "Tuning":
    from sluice.tuning.run import tune
    from sluice.tuning.steps import ConsoleSteps

    steps = ConsoleSteps(Console(stderr=True, soft_wrap=True, quiet=is_quiet), plan.goal)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(tune(plan, steps))
    finally:
        steps.stop()


def _finish(tuning: "Tuning", shown: str) -> int:
    """Print the report and write the files. Returns the exit code."""
    from sluice.tuning.page import render_page
    from sluice.tuning.report import print_report, result_document
    from sluice.tuning.trials import write_json

    console, folder = _console(), tuning.plan.folder
    print_report(tuning, console)
    try:
        files = tuning.plan.subject.write(tuning.verdict.chosen, folder)
        write_json(folder / "result.json", result_document(tuning, shown))
        (folder / "report.html").write_text(render_page(tuning, shown), encoding="utf-8")
    except OSError as error:
        return _fail(f"{error.filename} cannot be written: {error.strerror}", FAILED)
    names = ", ".join(str(path) for path in (*files, folder / "report.html", folder / "result.json"))
    console.print(f"written  {names}", markup=False, highlight=False)
    return FAILED if tuning.verdict.missed else 0


def _console() -> Console:
    """Return the console of the report. A file has lines as long as its tables need."""
    console = Console(soft_wrap=True)
    return console if console.is_terminal else Console(soft_wrap=True, width=_WIDTH_OF_FILES)


# -- the plan


def _plan(arguments: argparse.Namespace) -> "TunePlan":
    """Return the plan. Raises TuneError and LoadConfigError."""
    from sluice.tuning.driving import TunePlan
    from sluice.tuning.language_model import LanguageModelSubject
    from sluice.tuning.repository_model import RepositoryModelSubject

    repository = None if arguments.model_repository is None else arguments.model_repository.absolute()
    is_live = arguments.live or repository is not None
    load = _load(arguments, LOADS_LIVE if repository is not None else LOADS_SIMULATED)
    searched = _searched(arguments.search)
    subject: LanguageModelSubject | RepositoryModelSubject
    if repository is not None:
        if arguments.model is None:
            raise TuneError("--model-repository needs MODEL, the model of it to tune")
        if arguments.costs is not None:
            raise TuneError("--costs is for language models: models of a repository are not simulated")
        subject = RepositoryModelSubject(repository, arguments.model, arguments.serve, searched, load)
    else:
        subject = LanguageModelSubject(arguments.model, arguments.serve, searched, load)
    objective = _objective(arguments, "requests_per_s" if repository is not None else "tokens_per_s")
    drive = Drive(
        arguments.api or subject.default_api,
        subject.model,
        _workload(arguments),
        load.name,
        arguments.duration,
        arguments.timeout,
        arguments.slo,
    )
    return TunePlan(
        subject=subject,
        drive=drive,
        goal=Goal(objective, tuple(arguments.constraint)),
        folder=_folder(arguments),
        is_live=is_live,
        costs=arguments.costs,
        num_trials=arguments.trials or (TRIALS_LIVE if is_live else TRIALS_SIMULATED),
        num_checked=arguments.checks,
        num_rounds=arguments.rounds,
        seed=arguments.seed,
        setup=_setup(arguments, load, searched, objective),
    )


def _folder(arguments: argparse.Namespace) -> Path:
    """Return the folder of the output, by default one with the model's name in it, not its version's."""
    names = [part for part in Path(arguments.model or "bundled").parts if not part.isdecimal()]
    folder: Path = arguments.out or Path(f"tune-{names[-1] if names else 'model'}")
    return folder.absolute()


def _load(arguments: argparse.Namespace, usual: str) -> Dimension:
    """Return the loads to try. Raises TuneError."""
    if arguments.concurrency is not None and arguments.request_rate is not None:
        raise TuneError("--concurrency and --request-rate are two kinds of load: give one of them")
    is_rate = arguments.request_rate is not None
    flag, text = ("--request-rate", arguments.request_rate) if is_rate else ("--concurrency", arguments.concurrency)
    values = parse_values(text or usual)
    for value in values:
        if isinstance(value, str) or value <= 0 or not (is_rate or isinstance(value, int)):
            what = "numbers above 0" if is_rate else "whole numbers of at least 1"
            raise TuneError(f"{flag} {text}: got {value}; write {what}, as 1,2,4 or 1..64")
    return Dimension(REQUEST_RATE if is_rate else CONCURRENCY, values, values[0])


def _searched(given: list[tuple[str, tuple[Value, ...]]]) -> Mapping[str, tuple[Value, ...]]:
    names = [name for name, _ in given]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise TuneError(f"--search {repeated} is given twice: write all its values in one")
    return dict(given)


def _objective(arguments: argparse.Namespace, usual: str) -> Objective:
    objective: Objective = arguments.objective or Objective("goodput" if arguments.slo is not None else usual)
    wanted = [objective.figure, *(each.figure for each in arguments.constraint)]
    if "goodput" in wanted and arguments.slo is None:
        raise TuneError("goodput counts requests that meet targets: name them, as --slo ttft=500,itl=50")
    return objective


def _workload(arguments: argparse.Namespace) -> Workload:
    return Workload(
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        seed=arguments.seed,
        vocab_size=arguments.vocab_size,
        tokenizer=arguments.tokenizer,
        extra_body=arguments.extra_body,
        prefix_tokens=arguments.prefix_tokens,
        num_prefixes=arguments.num_prefixes,
        batch_size=arguments.batch_size,
        shapes=dict(arguments.shape),
    )


def _setup(
    arguments: argparse.Namespace, load: Dimension, searched: Mapping[str, tuple[Value, ...]], objective: Objective
) -> dict[str, Any]:
    """Return what trials of one folder have in common: those of another setup cannot be compared with them."""
    given = vars(arguments)
    names = ("prompt_tokens", "output_tokens", "model_repository", "tokenizer", "costs", "slo", "api")
    plain = ("model", "serve", "prefix_tokens", "num_prefixes", "vocab_size", "shape", "batch_size", "extra_body")
    return {
        **{name: None if given[name] is None else str(given[name]) for name in names},
        **{name: given[name] for name in (*plain, "duration", "seed", "live")},
        load.name: load.values,
        "search": dict(searched),
        "objective": objective.figure,
        "constraint": [str(each) for each in arguments.constraint],
    }

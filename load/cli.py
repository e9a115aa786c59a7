"""The command `sluice load`."""

import sys
from functools import partial
from typing import TYPE_CHECKING

from load.config import ConfigError, LoadConfig
from load.options import config_of, parser
from load.run import Run, RunError, run_blocking

if TYPE_CHECKING:
    from rich.console import Console

USAGE_ERROR = 2
INTERRUPTED = 130


def command(argv: list[str]) -> int:
    """Measure a streaming LLM server: latencies, throughput, failures."""
    arguments = parser().parse_args(argv)
    from load import report  # slow to import, and a wrong option needs none

    try:
        run = _execute(config_of(arguments), is_quiet=arguments.quiet)
    except (ConfigError, RunError) as error:
        return _complain(str(error))
    except KeyboardInterrupt:  # before the first measured request
        return INTERRUPTED
    report.print_report(run, _console(to_stderr=False))
    if arguments.json is not None:
        arguments.json.write_bytes(report.to_json(run, argv))
    if run.was_interrupted:
        return INTERRUPTED
    return int(run.summary.num_failed > 0 and not arguments.allow_failures)


def _complain(message: str) -> int:
    sys.stderr.write(f"sluice load: {message}\n")
    return USAGE_ERROR


def _console(to_stderr: bool) -> "Console":
    from rich.console import Console

    return Console(stderr=to_stderr, soft_wrap=True)


def _execute(config: LoadConfig, is_quiet: bool) -> Run:
    from load import progress

    watch = None if is_quiet else partial(progress.watch, console=_console(to_stderr=True))
    return run_blocking(config, watch)

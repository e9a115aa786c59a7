"""The command `sluice load`. `python -m load` does the same."""

import sys
from functools import partial
from typing import TYPE_CHECKING

from load.config import LoadConfig, LoadConfigError
from load.options import make_config, parser
from load.run import Run, RunError, run_blocking

if TYPE_CHECKING:
    from rich.console import Console

USAGE_ERROR = 2
INTERRUPTED = 130


def command(argv: list[str]) -> int:
    """Measure a streaming LLM server: latencies, throughput, failures."""
    arguments = parser().parse_args(argv)
    from load import report  # imported only after the options are checked, since it imports rich

    try:
        run = _execute(make_config(arguments), is_quiet=arguments.quiet)
    except (LoadConfigError, RunError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:  # before the first measured request
        return INTERRUPTED
    report.print_report(run, _console(to_stderr=False))
    if arguments.json is not None:
        arguments.json.write_bytes(report.to_json(run, argv))
    if run.was_interrupted:
        return INTERRUPTED
    return int(run.summary.num_failed > 0 and not arguments.allow_failures)


def _fail(message: str) -> int:
    sys.stderr.write(f"sluice load: {message}\n")
    return USAGE_ERROR


def _console(to_stderr: bool) -> "Console":
    from rich.console import Console

    return Console(stderr=to_stderr, soft_wrap=True)


def _execute(config: LoadConfig, is_quiet: bool) -> Run:
    from load import report

    view = None if is_quiet else partial(report.show_progress, console=_console(to_stderr=True))
    return run_blocking(config, view)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))

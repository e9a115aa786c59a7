"""The command `sluice load`. `python -m load` does the same."""

import sys
from functools import partial

from load.config import LoadConfigError
from load.options import make_config, parser
from load.run import RunError, run_blocking

USAGE_ERROR = 2
INTERRUPTED = 130


def command(argv: list[str]) -> int:
    """Measure a streaming LLM server: latencies, throughput, failures."""
    arguments = parser().parse_args(argv)
    # Imported only after the options are checked, since rich takes long.
    from rich.console import Console

    from load import report

    view = partial(report.show_progress, console=Console(stderr=True, soft_wrap=True))
    try:
        run = run_blocking(make_config(arguments), None if arguments.quiet else view)
    except (LoadConfigError, RunError) as error:
        sys.stderr.write(f"sluice load: {error}\n")
        return USAGE_ERROR
    except KeyboardInterrupt:  # before the first measured request
        return INTERRUPTED
    report.print_report(run, Console(soft_wrap=True))
    if arguments.json is not None:
        arguments.json.write_bytes(report.to_json(run, argv))
    if run.was_interrupted:
        return INTERRUPTED
    return int(run.summary.num_failed > 0 and not arguments.allow_failures)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))

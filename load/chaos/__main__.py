"""`python -m sluice.load.chaos`: a fleet of this machine under traffic and faults."""

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from sluice.load.chaos.faults import FAULTS
from sluice.load.chaos.processes import FleetError
from sluice.load.chaos.report import print_report, show_progress, to_json
from sluice.load.chaos.run import ChaosConfig, ChaosRun, run_chaos

_COULD_NOT_BEGIN, _INTERRUPTED = 2, 130
_DESCRIPTION = """\
Start two gateways, four engines, Redis and Postgres on this machine, send requests of every protocol, and kill, stop
and disturb all of it meanwhile. Each request must end whole and with the right text, in an error of its protocol's
shape, or by its client's leaving; when all is still, nothing may be held, and the ledgers must agree with the counters.
Ctrl-C or SIGTERM ends the run and reports what was seen until then.
Exit status: 0 no promise broken, 1 some broken, 2 the fleet did not start, 130 interrupted and none broken so far.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sluice.load.chaos",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults come. Default: 10")
    parser.add_argument(
        "--faults", type=_parse_faults, default=FAULTS, help=f"which, with commas between: {', '.join(FAULTS)}"
    )
    parser.add_argument("--seed", type=int, help="of faults and requests. Default: another one each time")
    parser.add_argument("--clients", type=int, default=12, help="requests at a time. Default: 12")
    parser.add_argument(
        "--light-clients", type=int, default=2, help="as many more that ask what costs little. Default: 2"
    )
    parser.add_argument("--gap", type=float, default=6.0, help="mean seconds between two faults. Default: 6")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint. Default: the bundled model")
    parser.add_argument("--folder", type=Path, help="for logs; kept. Default: a temporary one, kept on failure")
    parser.add_argument("--json", type=Path, help="also write the report as JSON to this file")
    return parser


def _parse_faults(text: str) -> tuple[str, ...]:
    names = tuple(each.strip() for each in text.split(","))
    if unknown := [each for each in names if each not in FAULTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no fault; there are {', '.join(FAULTS)}")
    return names


def main(argv: list[str]) -> int:
    """ChaosRun, report, and return the exit status."""
    arguments = _parser().parse_args(argv)
    seed = random.SystemRandom().randrange(1 << 16) if arguments.seed is None else arguments.seed
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="sluice-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    config = ChaosConfig(
        minutes=arguments.minutes,
        folder=folder.resolve(),
        faults=arguments.faults,
        seed=seed,
        num_clients=arguments.clients,
        mean_gap_s=arguments.gap,
        model=arguments.model,
        num_light=arguments.light_clients,
    )
    run, was_interrupted = ChaosRun(config), False
    try:
        asyncio.run(_run_shown(run))
    except FleetError as error:
        sys.stderr.write(f"sluice.load.chaos: {error}\n")
        return _COULD_NOT_BEGIN
    except (KeyboardInterrupt, asyncio.CancelledError):
        was_interrupted = True
    print_report(run, Console(soft_wrap=True))
    if arguments.json is not None:
        arguments.json.write_bytes(to_json(run))
    if not run.violations and not was_interrupted and arguments.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    if run.violations:
        return 1
    return _INTERRUPTED if was_interrupted else 0


async def _run_shown(run: ChaosRun) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    showing = asyncio.create_task(show_progress(run, Console(stderr=True, soft_wrap=True)))
    try:
        await run_chaos(run)
    finally:
        showing.cancel()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

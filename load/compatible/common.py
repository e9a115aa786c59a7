"""The parts that the commands of this folder share."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sluice.load.config import ApiKind, LoadConfig, LoadConfigError
from sluice.load.intervals import Floats
from sluice.load.run import Run, RunError, run_blocking
from sluice.load.stream import RequestResult
from sluice.load.summary import gaps_s

FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130


class ForeignParser(argparse.ArgumentParser):
    """A parser of another tool's flags. It takes none shortened: another flag of that tool may begin alike."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(
            prog,
            description=description,
            usage="%(prog)s [OPTION ...]",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def refuse(self, reason: str, *flags: str) -> None:
        """Add flags that cannot be honoured: `reason` says why, and what to do instead."""
        for flag in flags:
            self.add_argument(flag, action=_Refused, const=reason, nargs="*", help=argparse.SUPPRESS)

    def ignore(self, *flags: str, has_value: bool = False) -> None:
        """Add flags that change nothing of what is measured."""
        for flag in flags:
            action: dict[str, Any] = {"metavar": "..."} if has_value else {"action": "store_true"}
            self.add_argument(flag, help="taken, without effect", **action)


class _Refused(argparse.Action):
    """Ends with what a flag cannot do here."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        parser.error(f"{option_string}: {self.const}")


def note(prog: str, text: str) -> None:
    """Say on standard error what is done otherwise than the other tool does it."""
    sys.stderr.write(f"{prog}: {text}\n")


def run_as(prog: str, make: Callable[[], LoadConfig], show: Callable[[Run], None]) -> int:
    """Make the configuration, run it and show the run. Returns the exit status."""
    try:
        run = run_blocking(make())
    except (LoadConfigError, RunError) as error:
        note(prog, str(error))
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    show(run)
    if run.was_interrupted:
        return INTERRUPTED
    return FAILED if run.summary.num_failed else 0


@dataclass(frozen=True, slots=True)
class Latencies:
    """Samples in milliseconds of the served requests."""

    ttft: Floats
    second_token: Floats
    """The time from the first token event to the second."""
    tpot: Floats
    itl: Floats
    e2e: Floats

    @classmethod
    def of(cls, results: Sequence[RequestResult]) -> "Latencies":
        served = [result for result in results if result.is_ok]
        gaps = [gaps_s(result) for result in served]
        return cls(
            ttft=_ms(result.ttft_s for result in served),
            second_token=_ms(each[0] for each in gaps if each),
            tpot=_ms(result.tpot_s for result in served),
            itl=_ms(gap for each in gaps for gap in each),
            e2e=_ms(result.e2e_s for result in served),
        )


def _ms(seconds: Iterable[float | None]) -> Floats:
    return np.array([each * 1e3 for each in seconds if each is not None], np.float64)


def percentile(values: Floats, percent: float) -> float:
    """Return a percentile, 0 without values, as the other tools print it."""
    return float(np.percentile(values, percent)) if values.size else 0.0


def mean(values: Floats) -> float:
    return float(values.mean()) if values.size else 0.0


def deviation(values: Floats) -> float:
    return float(values.std()) if values.size else 0.0


_PATHS = {
    ApiKind.COMPLETIONS: "/v1/completions",
    ApiKind.CHAT: "/v1/chat/completions",
    ApiKind.EMBEDDINGS: "/v1/embeddings",
    ApiKind.RERANK: "/v1/rerank",
}


def check_endpoint(endpoint: str | None, api: ApiKind) -> None:
    """Raise LoadConfigError for an endpoint that is not the API's own."""
    path = _PATHS.get(api, "those of Triton's v2 protocol")
    if endpoint is not None and f"/{endpoint.lstrip('/')}" != path:
        raise LoadConfigError(f"--endpoint {endpoint}: the path of this API is {path}; a prefix belongs into the URL")


def http_url(text: str) -> str:
    """Return a URL for `host:port`, and a URL as it is."""
    return text if "://" in text else f"http://{text}"

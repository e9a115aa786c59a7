"""How long properties are tried: a few fixed examples in `make test`, many random ones in `make fuzz`."""

import os
from collections.abc import Callable
from functools import wraps
from time import monotonic
from typing import ParamSpec

from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.paths import ROOT

P = ParamSpec("P")

MINUTES = float(os.environ.get("SLUICE_FUZZ_MINUTES", "0"))  # noqa: TID251 - given by the Makefile
"""Minutes of `make fuzz`, which all properties share; 0 in `make test`."""
DATABASE = ROOT / "build" / "fuzz"
"""Examples that have failed, which the next `make fuzz` tries first."""
_NUM_EXAMPLES = 200
"""Examples between two looks at the clock."""
_UNCHECKED = (
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.large_base_example,
    HealthCheck.function_scoped_fixture,
)
_GENERATING = (Phase.explicit, Phase.generate, Phase.shrink)


class Share:
    """Seconds that one property has in `make fuzz`. The number of properties is known once they are collected."""

    seconds = 0.0


def example_settings(num_examples: int) -> settings:
    """Return Hypothesis' settings of a property that `make test` tries with so many examples."""
    if not MINUTES:
        return settings(
            max_examples=num_examples,
            stateful_step_count=20,
            derandomize=True,
            database=None,
            deadline=None,
            phases=_GENERATING,
            suppress_health_check=_UNCHECKED,
        )
    return settings(
        max_examples=_NUM_EXAMPLES,
        database=DirectoryBasedExampleDatabase(DATABASE),
        deadline=None,
        print_blob=True,
        suppress_health_check=_UNCHECKED,
    )


def fuzzed(num_examples: int) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Try a property of Hypothesis: with `num_examples` in `make test`, again and again in `make fuzz`."""

    def decorate(test: Callable[P, None]) -> Callable[P, None]:
        return repeated(example_settings(num_examples)(test))

    return decorate


def repeated(test: Callable[P, None]) -> Callable[P, None]:
    """Run a test again until its share of `make fuzz` is over; once in `make test`."""
    if not MINUTES:
        return test

    @wraps(test)
    def repeat(*args: P.args, **kwargs: P.kwargs) -> None:
        end = monotonic() + Share.seconds
        test(*args, **kwargs)
        while monotonic() < end:
            test(*args, **kwargs)

    return repeat

"""Costs of steps, fitted to measurements, and the file that `sluice simulate` reads."""

import asyncio
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.engine.simulation.profile import StepCosts, read_profile
from sluice.load.calibrate import COST_NAMES, CalibrationMeasurement, calibrate, fit
from sluice.load.config import LoadConfig, LoadTarget, RequestPace, Workload
from sluice.load.run import Run, RunError
from sluice.load.stream import Failure, FailureKind, PlannedRequest, RequestResult

COSTS = StepCosts(step_s=0.005, prefill_token_s=4e-5, decode_seq_s=3e-4, context_token_s=2e-7, attention_s=3e-9)
REQUEST_S = 0.002
CONFIG = LoadConfig(LoadTarget("http://nowhere"), RequestPace(concurrency=1, num_requests=1), Workload(), None)


class Server:
    """Answers at once with the times that a server would have whose steps cost COSTS."""

    def __init__(self, failure: Failure | None = None, tokens_per_event: int = 1) -> None:
        self.failure = failure
        self.tokens_per_event = tokens_per_event
        self.seeds: list[int] = []

    async def run(self, config: LoadConfig) -> Run:
        pace, work = config.pace, config.workload
        assert pace.concurrency is not None and pace.num_requests is not None
        self.seeds.append(work.seed)
        prompt, output, crowd = work.prompt_tokens.high, work.output_tokens.high, pace.concurrency
        ttft_s = REQUEST_S + COSTS.seconds(prompt, 0, 0, prompt * (prompt // 2))
        results = []
        for index in range(pace.num_requests):
            at = ttft_s
            times = array("d", [at])
            for place in range(1, output):
                at += COSTS.seconds(0, crowd, crowd * (prompt + place), 0)
                if place % self.tokens_per_event == 0:
                    times.append(at)
            planned = PlannedRequest(index, [], prompt, output)
            results.append(RequestResult(planned, 0.0, 0.0, at, times, prompt, output, "usage", "length", self.failure))
        fields: dict[str, Any] = dict.fromkeys(Run.__dataclass_fields__)
        return Run(**fields | {"model": "m", "results": results})


@pytest.mark.parametrize("tokens_per_event", [1, 3, 16])
def test_costs_are_found_again(tmp_path: Path, tokens_per_event: int) -> None:
    server, lines = Server(tokens_per_event=tokens_per_event), list[str]()
    found = asyncio.run(calibrate(CONFIG, 2000, 32, lines.append, server.run))
    assert found.worst_error < 0.03
    for name in ("step_s", "prefill_token_s", "decode_seq_s", "context_token_s", "attention_s"):
        assert found.costs[name] == pytest.approx(getattr(COSTS, name), rel=0.15), name
    assert len(set(server.seeds)) == len(server.seeds) == len(lines)
    path = tmp_path / "costs.json"
    path.write_bytes(found.to_json())
    profile = read_profile(path)
    assert profile.name == "m"
    assert profile.costs == StepCosts(**{n: found.costs[n] for n in COST_NAMES if n != "request_s"})
    assert profile.request_s == pytest.approx(REQUEST_S, rel=0.3)


def test_a_request_that_fails_ends_the_calibration() -> None:
    server = Server(Failure(FailureKind.HTTP, "busy", 503))
    with pytest.raises(RunError, match="a request failed: http_503: busy"):
        asyncio.run(calibrate(CONFIG, 64, 2, lambda _: None, server.run))


def test_answers_in_one_event_say_nothing_of_steps() -> None:
    with pytest.raises(RunError, match="no answer has enough events"):
        asyncio.run(calibrate(CONFIG, 64, 2, lambda _: None, Server(tokens_per_event=100).run))


def test_no_cost_is_below_zero() -> None:
    """A gap that shrinks with the crowd, as noise can have it, leaves out the cost of a sequence."""
    measured = [
        CalibrationMeasurement(1.0 - 0.1 * crowd, (1.0, 0.0, crowd, 0.0, 0.0, 0.0)) for crowd in (1.0, 2.0, 3.0)
    ]
    found = fit("m", measured)
    assert found.costs["decode_seq_s"] == 0.0
    assert 0.7 < found.costs["step_s"] < 0.9
    assert msgspec.json.decode(found.to_json())["costs"]["decode_seq_s"] == 0.0

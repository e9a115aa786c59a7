"""Points in simulated time: the requests are those of the load tool, and limits are the point's own."""

from itertools import islice
from pathlib import Path

import psutil
import pytest

from sluice.engine.simulation.profile import bundled_profile
from sluice.load.config import ApiKind, TokenRange, Workload
from sluice.load.workload import planned_requests, prompt_source
from sluice.tuning.driving import CONCURRENCY, REQUEST_RATE, Drive
from sluice.tuning.errors import TrialFailedError, TuneError
from sluice.tuning.language_model import EngineLimits, LanguageModelSubject
from sluice.tuning.server import TrialServer
from sluice.tuning.simulating import Numbers, Simulator
from sluice.tuning.space import Dimension, Value

LIMITS = EngineLimits("openvino", 64, 2048, 1024, 1092, 32)
WORKLOAD = Workload(TokenRange(40, 200), TokenRange(16, 64), seed=3, prefix_tokens=32, num_prefixes=3)


def simulator(
    folder: Path, load: Dimension, searched: dict[str, tuple[Value, ...]] | None = None, *extra: str
) -> Simulator:
    subject = LanguageModelSubject(None, extra, searched or {}, load, limits=LIMITS)
    drive = Drive(ApiKind.COMPLETIONS, None, WORKLOAD, load.name, 5.0, 60.0, None)
    made = Simulator(subject, drive, folder, lambda line: None)
    made._profiles[""] = bundled_profile()
    return made


def test_simulated_requests_have_the_lengths_and_starts_of_sent_ones() -> None:
    source = prompt_source(ApiKind.COMPLETIONS, WORKLOAD)
    numbered = list(islice(planned_requests(WORKLOAD, Numbers(source)), 50))
    sent = list(islice(planned_requests(WORKLOAD, source), 50))
    lengths = [(each.prompt_tokens, each.output_tokens) for each in numbered]
    assert lengths == [(each.prompt_tokens, each.output_tokens) for each in sent]
    starts = {tuple(each.prompt[:32]): number for number, each in reversed(list(enumerate(sent)))}
    groups = [starts[tuple(each.prompt[:32])] for each in sent]
    firsts = [numbered[number].prompt[0] for number in groups]
    assert [each.prompt[0] for each in numbered] == firsts
    assert len(set(firsts)) == 3


async def test_more_sequences_bring_more_tokens_and_fewer_wait(tmp_path: Path) -> None:
    made = simulator(tmp_path, Dimension(CONCURRENCY, (32,), 32))
    point = made.subject.space.default_point(32)
    few, many = [await made.measure(point | {"max-num-seqs": count}) for count in (4, 64)]
    assert many["tokens_per_s"] > 1.3 * few["tokens_per_s"]
    assert many["p99_ttft"] < few["p99_ttft"]
    assert many["p50_itl"] > few["p50_itl"]


async def test_requests_come_at_a_rate(tmp_path: Path) -> None:
    made = simulator(tmp_path, Dimension(REQUEST_RATE, (2, 5), 2))
    slow, fast = [await made.measure(made.subject.space.default_point(rate)) for rate in (2, 5)]
    assert slow["requests_per_s"] == pytest.approx(2.0, rel=0.2)
    assert fast["requests_per_s"] == pytest.approx(5.0, rel=0.2)


async def test_a_point_that_cannot_hold_a_request_fails(tmp_path: Path) -> None:
    made = simulator(tmp_path, Dimension(CONCURRENCY, (2,), 2), {"num-blocks": (2,)})
    with pytest.raises(TrialFailedError, match="can never fit"):
        await made.measure(made.subject.space.default_point(2) | {"num-blocks": 2})


@pytest.mark.parametrize(
    ("searched", "extra", "said"),
    [({"replicas": (1, 2)}, (), "on the CPU they share the cores"), (None, ("--replicas", "2"), "add --live")],
)
async def test_replicas_on_a_cpu_are_not_simulated(
    tmp_path: Path,
    server_of_nothing: TrialServer,
    searched: dict[str, tuple[Value, ...]],
    extra: tuple[str],
    said: str,
) -> None:
    made = simulator(tmp_path, Dimension(CONCURRENCY, (2,), 2), searched, *extra)
    with pytest.raises(TuneError, match=said):
        await made.prepare(server_of_nothing)


@pytest.fixture
def server_of_nothing(tmp_path: Path) -> TrialServer:
    """A server that nobody may ask: what is refused is refused before."""

    return TrialServer("http://127.0.0.1:9", "http://127.0.0.1:9", psutil.Process(), tmp_path / "log")


async def test_costs_that_were_calibrated_before_are_read(tmp_path: Path, server_of_nothing: TrialServer) -> None:
    made = simulator(tmp_path, Dimension(CONCURRENCY, (2,), 2))
    made.costs = tmp_path / "costs.json"
    made.costs.write_text('{"costs": {"step_s": 1.0}}')
    with pytest.raises(TuneError, match=r"--costs: .*costs\.json is no profile of a replica"):
        await made.prepare(server_of_nothing)
    made.costs.write_text('{"costs": {"step_s": 0.5, "prefill_token_s": 0.001}}')
    await made.prepare(server_of_nothing)
    figures = await made.measure(made.subject.space.default_point(2))
    assert figures["p50_itl"] >= 500.0

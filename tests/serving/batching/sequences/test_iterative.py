"""Requests that the model runs as often as it wants (`iterative_sequence`)."""

import random

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.job import InferJob
from sluice.serving.request import InferResponse
from tests.serving.batching.parts import HeldInstance, turns
from tests.serving.batching.sequences.parts import CONFIG, END, NONE, START, Clients, Computed, control, sequences
from tests.waiting import until

OLDEST = "oldest { max_candidate_sequences: 4 }"
ITERATIVE = sequences(OLDEST + " iterative_sequence: true")
STREAMING = CONFIG + "model_transaction_policy { decoupled: true }"


def value_of(job: InferJob) -> int:
    return int(job.request.inputs["X"].array.item())


def id_of(job: InferJob) -> int:
    return int(job.request.inputs["CORRID"].array.item())


class CountDown:
    """Runs a request as often as its input says, with a response for each run but the last."""

    def __init__(self, *, streams: bool = False) -> None:
        self.left: dict[int, int] = {}
        self.runs: list[list[tuple[int, bool]]] = []
        """By batch: which sequence ran, and whether it began there."""
        self.instance = Computed(self._run)
        self._streams = streams

    def _run(self, jobs: list[InferJob]) -> None:
        self.runs.append([(id_of(job), bool(control(job, "START"))) for job in jobs])
        for job in jobs:
            self._run_one(job)

    def _run_one(self, job: InferJob) -> None:
        key = id_of(job)
        if control(job, "START"):
            self.left[key] = value_of(job)
        self.left[key] -= 1
        if not self.left[key]:
            del self.left[key]
            job.respond(InferResponse([job.request.inputs["X"].renamed("Y")]))
            return
        if self._streams:
            job.respond(InferResponse([job.request.inputs["X"].renamed("Y")], is_final=False))
        job.reschedule()


async def done(clients: Clients) -> None:
    await until(lambda: clients.model.num_in_flight == 0)


async def test_a_request_runs_until_the_model_has_finished_with_it() -> None:
    model = CountDown()
    clients = Clients(ITERATIVE, model.instance)
    job = clients.submit("a", 0, value=3)
    await done(clients)
    assert model.runs == [[(1, True)], [(1, False)], [(1, False)]]
    assert clients.answered == ["a"]
    assert job.request.correlation_id == 1
    statistics = clients.model.statistics
    assert (statistics.infer.success.count, statistics.inference_count, statistics.execution_count) == (1, 1, 3)


async def test_requests_that_arrive_meanwhile_share_its_batches() -> None:
    model = CountDown()
    clients = Clients(ITERATIVE, model.instance)
    clients.submit("a", 0, value=4)
    await until(lambda: len(model.runs) == 1)
    clients.submit("b", 0, value=2)
    await done(clients)
    assert [sorted(key for key, _ in batch) for batch in model.runs] == [[1], [1], [1, 2], [1, 2]]
    assert clients.answered == ["b", "a"]


async def test_a_streams_responses_come_between_its_runs() -> None:
    model = CountDown(streams=True)
    clients = Clients(ITERATIVE, model.instance, base=STREAMING)
    clients.submit("a", 0, value=3)
    await until(lambda: clients.answered == ["a"])
    assert clients.model.num_in_flight == 1
    await done(clients)
    assert clients.answered == ["a"] * 3


async def test_ids_of_clients_are_kept_and_not_given_to_others() -> None:
    model = CountDown()
    clients = Clients(ITERATIVE, model.instance)
    assert "must specify the START flag" in clients.refusal(1)
    clients.submit("own", 1, START, value=3)
    clients.submit("given", 0, value=2)
    await done(clients)
    assert {key for batch in model.runs for key, _ in batch} == {1, 2}
    assert "must specify the START flag" in clients.refusal(1)


async def test_one_with_an_end_flag_runs_on_too() -> None:
    model = CountDown()
    clients = Clients(ITERATIVE, model.instance)
    clients.submit("a", 5, START | END, value=3)
    await done(clients)
    assert model.runs == [[(5, True)], [(5, False)], [(5, False)]]


async def test_an_error_ends_it() -> None:
    def fails(jobs: list[InferJob]) -> None:
        for job in jobs:
            if control(job, "START"):
                job.reschedule()
            else:
                job.fail(SluiceError(ErrorCode.INTERNAL, "no more"))

    clients = Clients(ITERATIVE, Computed(fails))
    clients.submit("a", 0)
    await done(clients)
    assert clients.errors["a"].message == "no more"
    assert len(clients.batcher._live._by_id) == 0


@pytest.mark.parametrize("is_running", [True, False])
async def test_cancelled_it_runs_no_more(is_running: bool) -> None:
    instance = HeldInstance()
    clients = Clients(sequences("oldest { max_candidate_sequences: 2 } iterative_sequence: true"), instance)
    job = clients.submit("a", 0, value=3)
    await until(lambda: instance.is_running)
    if not is_running:
        job.reschedule()  # it waits for its second turn
    job.cancel()
    if is_running:
        job.reschedule()  # the model does not know
    assert job.is_finished
    assert clients.model.num_in_flight == 0
    clients.submit("b", 0)
    instance.finish()
    await until(lambda: instance.is_running)
    assert instance.ids == [["a"], ["b"]]
    instance.finish()


async def test_requests_of_one_id_run_one_after_the_other_and_cancelling_one_leaves_the_others() -> None:
    model = CountDown()
    clients = Clients(ITERATIVE, model.instance)
    first = clients.submit("a", 5, START, value=2)
    second = clients.submit("b", 5, START, value=2)
    clients.submit("c", 5, START, value=2)
    second.cancel()
    await done(clients)
    assert first.is_finished
    assert clients.answered == ["a", "c"]
    assert [began for ((_, began),) in model.runs] == [True, False, True, False]
    assert "START" in clients.refusal(5)


async def test_where_it_is_not_configured_it_is_refused() -> None:
    def again(jobs: list[InferJob]) -> None:
        for job in jobs:
            job.reschedule()

    clients = Clients(sequences(), Computed(again))
    clients.submit("a", 1, START)
    await done(clients)
    assert clients.errors["a"].code is ErrorCode.INVALID
    assert clients.errors["a"].message == (
        "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
        "such a flag: that takes sequence_batching { iterative_sequence: true }"
    )


async def test_closing_fails_what_waits_for_its_next_run() -> None:
    instance = HeldInstance()
    clients = Clients(ITERATIVE, instance)
    job = clients.submit("a", 0)
    await until(lambda: instance.is_running)
    job.reschedule()
    await clients.model.close()
    assert clients.errors["a"].code is ErrorCode.UNAVAILABLE
    assert clients.model.num_in_flight == 0


@pytest.mark.parametrize("strategy", [OLDEST, "direct { }"])
@pytest.mark.parametrize("seed", range(3))
async def test_many_at_once_each_run_as_often_as_they_want(strategy: str, seed: int) -> None:
    chance = random.Random(seed)
    model = CountDown(streams=True)
    run_all = model._run

    def only_ready(jobs: list[InferJob]) -> None:
        run_all([job for job in jobs if control(job, "READY")])

    model.instance.compute = only_ready
    clients = Clients(sequences(f"{strategy} iterative_sequence: true"), model.instance, base=STREAMING)
    counts = {f"r{number}": chance.randint(1, 9) for number in range(40)}
    for name, count in counts.items():
        clients.submit(name, 0, NONE, value=count)
        if chance.random() < 0.5:
            await turns(1)
    await done(clients)
    assert {name: clients.answered.count(name) for name in counts} == counts
    assert not model.left
    assert clients.model.statistics.count_pending() == 0

"""Sequences whose state goes with the process that had it, and those that wait for too long."""

import pytest

from sluice.errors import ErrorCode
from sluice.serving.job import InferJob
from tests.serving.batching.parts import Script, turns
from tests.serving.batching.sequences.parts import END, START, Clients, Process, control, sequences
from tests.waiting import until

DIRECT = sequences("direct { }")
LOST = (
    "the state of sequence 1 of model 'sums' was lost with a process of sums_0: begin the sequence again, with the "
    "START flag"
)


async def run(instance: Process) -> list[InferJob]:
    await until(lambda: instance.is_running)
    batch = instance.batches[-1]
    instance.finish()
    return batch


@pytest.mark.parametrize("strategy", [sequences(), DIRECT])
async def test_what_follows_a_crash_is_refused_until_it_begins_anew(strategy: str) -> None:
    instance = Process()
    clients = Clients(strategy, instance)
    clients.submit("a1", 1, START)
    clients.submit("a2", 1)
    await until(lambda: instance.is_running)
    instance.die()
    assert clients.errors["a1"].message == "not healthy"
    assert (clients.errors["a2"].code, clients.errors["a2"].message) == (ErrorCode.UNAVAILABLE, LOST)
    assert clients.lost(1) == LOST
    instance.come_back()
    assert clients.lost(1) == LOST
    clients.submit("a3", 1, START)
    assert [job.request.id for job in await run(instance)] == ["a3"]
    clients.submit("a4", 1, END)
    assert [job.request.id for job in await run(instance)] == ["a4"]
    assert clients.model.num_in_flight == 0


TWO = sequences("oldest { max_candidate_sequences: 2 }")
CRASHES: dict[str, tuple[str, str, str, str]] = {
    "a crash between requests": (sequences(), "a1+ | .0 x0 a2 |", "a1", "a2"),
    "a crash between requests, on a row": (DIRECT, "a1+ | .0 x0 a2 |", "a1", "a2"),
    "the next process does not know it": (sequences(), "a1+ | .0 x0 +0 a2 |", "a1", "a2"),
    "the next process does not know its row": (DIRECT, "a1+ | .0 x0 +0 a2 |", "a1", "a2"),
    "what was queued behind a batch": (TWO, "a1+ | .0 b1+ | a2 c1+ | x0 | +0 | .0", "a1 b1 c1", "a2"),
    "fillers take the rows of the lost": (DIRECT, "a1+ b1+ | .0 a2 b2+ x0 +0 |", "a1b1 --b2", "a2"),
    "a new start in the line is not lost": (sequences(), "a1+ | a2 a3+ a4- x0 +0 | .0 | .0", "a1 a3 a4", "a2"),
    "one that begins while there is no process runs on the next": (sequences(), "x0 a1+ | +0 .0 a2 | .0", "a1 a2", ""),
}


@pytest.mark.parametrize("case", CRASHES)
async def test_what_a_crash_takes_along(case: str) -> None:
    extra, words, expected, lost = CRASHES[case]
    instance = Process()
    clients = Clients(extra, instance)
    assert await Script([instance], clients.submit_word).play(words) == expected
    assert [name for name, error in clients.errors.items() if error.message == LOST] == lost.split()
    assert all(error.message in (LOST, "not healthy") for error in clients.errors.values())
    await clients.model.close()


async def test_a_crash_under_one_sequence_is_one_for_all_on_the_instance() -> None:
    instance = Process()
    clients = Clients(sequences(), instance)
    for number in (1, 2):
        clients.submit(f"start {number}", number, START)
    await run(instance)
    clients.submit("b2", 2)
    await until(lambda: instance.is_running)
    instance.die()
    instance.is_up = True  # by the time of the next request, and the instance does not say how often it was started
    assert clients.errors["b2"].message == "not healthy"
    clients.submit("a2", 1)
    assert clients.errors["a2"].message == LOST


async def test_a_lost_sequence_is_remembered_no_longer_than_an_idle_one() -> None:
    instance = Process()
    clients = Clients(sequences(idle_us=20_000), instance)
    clients.submit("a1", 1, START)
    await until(lambda: instance.is_running)
    instance.die()
    assert clients.lost(1) == LOST
    await until(lambda: clients.batcher._live.get(1) is None)
    assert "must specify the START flag on the first request" in clients.refusal(1)


async def test_a_request_between_two_runs_is_lost_too() -> None:
    instance = Process()
    clients = Clients(sequences("oldest { } iterative_sequence: true"), instance)
    job = clients.submit("a", 0)
    clients.submit("b", 0)
    await until(lambda: instance.is_running)
    instance.give_back(job)
    instance.die()
    await until(lambda: clients.model.num_in_flight == 0)
    assert clients.errors["a"].message == "the state of the request was lost with a process of sums_0: send it again"
    assert clients.errors["b"].message == "not healthy"


async def test_a_sequence_that_waits_for_a_place_for_longer_than_its_timeout_is_refused() -> None:
    instance = Process()
    clients = Clients(sequences("oldest { max_candidate_sequences: 1 }"), instance)
    clients.submit("a1", 1, START)
    clients.submit("b1", 2, START)
    clients.submit("b2", 2, timeout_us=2_000)
    clients.submit("c1", 3, START, timeout_us=60_000_000)
    await until(lambda: len(clients.errors) == 2)
    expected = (ErrorCode.UNAVAILABLE, "timeout of the corresponding sequence has been expired")
    assert {(clients.errors[name].code, clients.errors[name].message) for name in ("b1", "b2")} == {expected}
    assert "must specify the START flag" in clients.refusal(2)
    assert clients.model.statistics.infer.fail.count == 2
    clients.submit("a2", 1, END)
    assert [[job.request.id for job in await run(instance)] for _ in range(3)] == [["a1"], ["a2"], ["c1"]]


async def test_the_timeout_counts_only_while_a_sequence_waits_for_its_place() -> None:
    instance = Process()
    clients = Clients(sequences(), instance)
    clients.submit("a1", 1, START, timeout_us=1)
    await until(lambda: instance.is_running)
    clients.submit("a2", 1, timeout_us=1)
    await turns(10)
    assert [[job.request.id for job in await run(instance)] for _ in range(2)] == [["a1"], ["a2"]]


async def test_a_sequence_that_waits_is_not_idle_and_is_once_it_was_served() -> None:
    instance = Process()
    clients = Clients(sequences("oldest { max_candidate_sequences: 1 }", idle_us=20_000), instance)
    clients.submit("a1", 1, START)
    clients.submit("b1", 2, START)
    await until(lambda: instance.is_running)
    clients.batcher._live.get(2).used_ns -= 10**9  # type: ignore[union-attr]
    clients.batcher._expire()
    clients.submit("b2", 2)
    clients.submit("a2", 1, END)
    assert [[job.request.id for job in await run(instance)] for _ in range(4)] == [["a1"], ["a2"], ["b1"], ["b2"]]
    await until(lambda: clients.batcher._live.get(2) is None)
    assert "must specify the START flag" in clients.refusal(2)


async def test_an_id_of_64_bits_and_the_negative_number_of_the_same_bits_are_one() -> None:
    instance = Process()
    clients = Clients(sequences(), instance)
    clients.submit("a1", 2**64 - 1, START)
    assert control((await run(instance))[0], "CORRID") == 2**64 - 1
    clients.submit("a2", -1, END)
    await run(instance)
    assert str(2**64 - 1) in clients.refusal(-1)


async def test_what_runs_is_served_when_the_model_is_unloaded_and_what_waits_is_refused() -> None:
    instance = Process()
    clients = Clients(sequences("oldest { max_candidate_sequences: 1 }"), instance)
    clients.submit("a1", 1, START)
    clients.submit("b1", 2, START)
    await run(instance)
    await clients.model.unload(timeout_s=0.01)
    assert clients.answered == ["a1", "b1"]
    assert set(clients.errors) == {"b1"}
    assert instance.is_closed

import random
from collections.abc import Callable

import numpy as np
import pytest

from sluice.errors import ErrorCode
from sluice.serving.instance import Instance
from sluice.serving.job import InferJob
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.tensors.tensor import Tensor
from tests.serving.batching.parts import HeldInstance, Script, model_of, turns
from tests.serving.batching.sequences.parts import CONFIG, END, NONE, START, Clients, control, sequences
from tests.waiting import until

FOUR, ONE = sequences(), sequences("oldest { max_candidate_sequences: 1 }")
DIRECT = sequences("direct { }")
BATCHES: dict[str, tuple[str, int, str, str]] = {
    "requests of a sequence never share a batch, those of several do": (
        FOUR, 1, "a1+ a2 b1+ c1+ b2- | .0 |", "a1b1c1 a2b2"
    ),
    "a sequence stays on its instance": (FOUR, 2, "a1+ b1+ a2 | .1 | .0 |", "a1 a2; b1"),
    "those beyond the places wait for one to end": (
        ONE, 1, "a1+ b1+ b2- c1+- | .0 | a2- | .0 | .0 | .0 |", "a1 a2 b1 b2 c1"
    ),
    "one that begins anew after its end follows it and waits for its turn": (
        ONE, 1, "a1+ b1+- a2- a3+ a4- | .0 | .0 | .0 | .0 | .0", "a1 a2 b1 a3 a4"
    ),
    "an end cancelled in the line still ends the sequence": (ONE, 1, "a1+ a2- b1+ | -a2 .0 |", "a1 b1"),
    "a place that became free is taken at once": (ONE, 1, "a1+- | .0 b1+- | .0 c1+- | .0", "a1 b1 c1"),
    "starting again in the middle goes on in the same place": (ONE, 1, "a1+ | .0 a2+ b1+ | .0 |", "a1 a2"),
    "one that lost a request gives its place to the next": (ONE, 1, "a1+ b1+ | a2 -a2 | .0 |", "a1 b1"),
    "one that is cancelled in the line takes no place": (ONE, 1, "a1+- b1+ c1+ | -b1 .0 |", "a1 c1"),
    "one whose request is cancelled while it runs does not": (FOUR, 1, "a1+ | -a1 a2 .0 |", "a1 a2"),
    "direct: instances fill up alike": (DIRECT, 2, "a1+ b1+ c1+ d1+ e1+ |", "a1c1e1; b1d1"),
    "direct: a row without a request has a filler": (DIRECT, 1, "a1+ b1+ c1+ | .0 c2 |", "a1b1c1 ----c2"),
    "direct: a batch ends with the last row that has a request": (DIRECT, 1, "a1+ b1+ c1+ | .0 b2 |", "a1b1c1 --b2"),
    "direct: an end frees the row once it is answered": (
        DIRECT, 1, "a1+ b1+ c1+ d1+ | .0 b2- e1+ | .0 |", "a1b1c1d1 --b2 --e1"
    ),
    "direct: a cancelled request leaves its row": (DIRECT, 1, "a1+ b1+ c1+ | .0 c2 a2 -c2 |", "a1b1c1 a2"),
}  # fmt: skip


@pytest.mark.parametrize("case", BATCHES)
async def test_which_sequences_run_together_where_and_when(case: str) -> None:
    extra, num_instances, words, expected = BATCHES[case]
    instances = [HeldInstance(str(number)) for number in range(num_instances)]
    clients = Clients(extra, *instances)
    assert await Script(instances, clients.submit_word).play(words) == expected
    await clients.model.close()


async def test_the_model_learns_where_each_request_stands() -> None:
    instance = HeldInstance()
    clients = Clients(sequences(), instance)
    seen = []
    for name, flags in (("a", START), ("b", NONE), ("c", END)):
        clients.submit(name, 7, flags)
        await until(lambda: instance.is_running)
        ((job,),) = instance.batches[-1:]
        seen.append([control(job, each) for each in ("START", "END", "READY", "CORRID")])
        instance.finish()
    assert seen == [[1, 2.0, True, 7], [0, 2.0, True, 7], [0, 3.0, True, 7]]
    clients.submit("only", 7, START | END)
    await until(lambda: instance.is_running)
    assert [control(instance.batches[-1][0], each) for each in ("START", "END")] == [1, 3.0]
    instance.finish()


async def test_what_fits_no_sequence_is_refused_in_tritons_words() -> None:
    clients = Clients(sequences(), HeldInstance())
    need = "inference request to model 'sums' must specify "
    assert clients.refusal(0, START) == need + "a non-zero or non-empty correlation ID"
    assert clients.refusal("", START) == need + "a non-zero or non-empty correlation ID"
    assert clients.refusal(5, START, rows=2) == need + "batch-size 1 due to requirements of sequence batcher"
    for given, spelled in ((5, "5"), ("abcd", "abcd"), (-3, str(2**64 - 3))):
        assert clients.refusal(given) == (
            f"inference request for sequence {spelled} to model 'sums' must specify the START flag on the first "
            "request of the sequence"
        )
    assert clients.model.statistics.infer.fail.count == 0


async def test_after_the_end_a_sequence_must_start_again() -> None:
    instance = HeldInstance()
    clients = Clients(sequences(), instance)
    clients.submit("a", 1, START | END)
    assert "must specify the START flag" in clients.refusal(1)
    await turns()
    instance.finish()
    clients.submit("b", 1, START)
    await turns()
    assert instance.ids == [["a"], ["b"]]


@pytest.mark.parametrize("preserves", [True, False])
async def test_streams_pass_in_the_order_of_their_requests_where_that_is_asked_for(preserves: bool) -> None:
    instance = HeldInstance()
    strategy = f"oldest {{ max_candidate_sequences: 4 preserve_ordering: {str(preserves).lower()} }}"
    clients = Clients(sequences(strategy), instance, base=CONFIG + "model_transaction_policy { decoupled: true }")
    first = clients.submit("a1", 1, START)
    second = clients.submit("b1", 2, START)
    third = clients.submit("c1", 3, START)
    await turns()
    second.respond(InferResponse([second.request.inputs["X"]], is_final=False))
    second.respond(InferResponse())
    third.respond(InferResponse())
    assert clients.answered == ([] if preserves else ["b1", "b1", "c1"])
    clients.submit("b2", 2, END)  # the sequence itself goes on
    first.cancel()
    instance.finish()
    await until(lambda: instance.is_running)
    assert instance.ids[-1] == ["b2"]
    instance.finish()
    assert clients.answered == ["b1", "b1", "c1", "b2"]


async def test_an_idle_sequence_loses_its_place() -> None:
    instance = HeldInstance()
    clients = Clients(sequences("oldest { max_candidate_sequences: 1 }", idle_us=20_000), instance)
    clients.submit("a1", 1, START)
    clients.submit("b1", 2, START)
    await turns()
    instance.finish()
    await until(lambda: instance.is_running)
    assert instance.ids == [["a1"], ["b1"]]
    assert "START" in clients.refusal(1)


async def test_a_running_sequence_is_not_idle_and_one_that_was_used_just_now_is_not_yet() -> None:
    instance = HeldInstance()
    clients = Clients(sequences(), instance)
    job = clients.submit("a1", 1, START)
    await until(lambda: instance.is_running)
    job.started_ns -= 10**12
    clients.batcher._live.get(1).used_ns -= 10**12  # type: ignore[union-attr]
    clients.batcher._expire()
    instance.finish()
    clients.batcher._expire()
    clients.submit("a2", 1)


async def test_a_cancelled_request_ends_its_sequence() -> None:
    instance = HeldInstance()
    clients = Clients(sequences(), instance)
    clients.submit("a1", 1, START)
    await turns()
    second = clients.submit("a2", 1)
    clients.submit("a3", 1)
    second.cancel()
    assert second.is_finished
    assert clients.errors["a3"].code is ErrorCode.CANCELLED
    assert "START" in clients.refusal(1)
    instance.finish()
    assert clients.answered == ["a3", "a1"]
    assert clients.model.num_in_flight == 0
    clients.submit("new", 1, START)
    await turns()
    assert instance.ids == [["a1"], ["new"]]


@pytest.mark.parametrize(
    ("id", "given", "seen"),
    [
        ("UINT64", 9, 9),
        ("INT64", -3, -3),
        ("UINT64", -3, 2**64 - 3),
        ("INT32", 9, 9),
        ("STRING", "abc", b"abc"),
        ("STRING", 12, b"12"),
        ("UINT64", "abc", 0x00636261_00000003),
        ("UINT64", "abcdefgh", 0x64636261_00000008),
    ],
)
async def test_the_id_comes_in_the_type_that_the_model_wants(id: str, given: int | str, seen: object) -> None:
    instance = HeldInstance()
    clients = Clients(sequences(id=id), instance)
    clients.submit("a", given, START)
    await turns()
    assert control(instance.batches[0][0], "CORRID") == seen


async def test_texts_that_would_become_the_same_number_do_not() -> None:
    instance = HeldInstance()
    clients = Clients(sequences(), instance)
    for given in ("abcdefg1", "abcdefg2", "abcdefg3"):
        clients.submit(given, given, START)
    await turns()
    assert len({control(job, "CORRID") for job in instance.batches[0]}) == 3


async def test_closing_fails_what_waits_for_its_turn() -> None:
    instance = HeldInstance()
    clients = Clients(sequences("oldest { max_candidate_sequences: 1 }"), instance)
    for name, of, flags in (("a1", 1, START), ("a2", 1, NONE), ("a3", 1, NONE), ("b1", 2, START)):
        clients.submit(name, of, flags)
    await turns()
    await clients.model.close()
    assert set(clients.errors) == {"a1", "a2", "a3", "b1"}
    assert clients.model.num_in_flight == 0


class Summing(Instance):
    """Keeps a sum for each sequence, as a stateful model does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sums: dict[object, int] = {}

    def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        ready = [job for job in jobs if job.request.inputs["READY"].array.item()]
        assert len({job.request.correlation_id for job in ready}) == len(ready) <= len(jobs) <= 4
        for job in set(jobs).difference(ready):
            job.respond(InferResponse([job.request.inputs["X"].renamed("Y")]))
        for job in ready:
            inputs = job.request.inputs
            key = inputs["CORRID"].array.item()
            before = 0 if inputs["START"].array.item() else self.sums[key]
            self.sums[key] = before + int(inputs["X"].array.item())
            total = np.array([[self.sums[key]]], np.int32)
            job.respond(InferResponse([Tensor.of("Y", total)]))
        done()

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("seed", range(4))
async def test_many_sequences_at_once_each_get_their_own_sums(seed: int) -> None:
    chance = random.Random(seed)
    strategy = chance.choice(("oldest { max_candidate_sequences: 2 }", "direct { }"))
    model = model_of(sequences(strategy), Summing("one"), Summing("two"), base=CONFIG)
    sums: dict[int, list[int]] = {number: [] for number in range(1, 21)}
    left = {number: chance.randint(1, 9) for number in sums}
    lengths = dict(left)

    def receive_of(number: int) -> Callable[[InferResponse], None]:
        return lambda response: sums[number].append(int(response.outputs[0].array.item()))

    while left:
        number = chance.choice(list(left))
        flags = START if left[number] == lengths[number] else NONE
        left[number] -= 1
        if not left[number]:
            flags |= END
            del left[number]
        x = Tensor.of("X", np.array([[1]], np.int32))
        model.submit(InferRequest({"X": x}, correlation_id=number, sequence=flags), receive_of(number))
        if chance.random() < 0.3:
            await turns(1)
    await until(lambda: model.num_in_flight == 0)
    assert sums == {number: list(range(1, length + 1)) for number, length in lengths.items()}
    assert model.statistics.count_pending() == 0
    await model.close()

"""States that the batcher keeps: given to each request of a sequence, and taken out of its response."""

import struct
from pathlib import Path

import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.batching.sequences.inputs import read_initial_states
from sluice.serving.job import InferJob
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSource
from sluice.serving.tensors.tensor import Tensor
from tests.serving.batching.parts import config_of
from tests.serving.batching.sequences.parts import CONFIG, CONTROLS, END, NONE, START, Clients, Computed, control
from tests.waiting import until

STATE = 'input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: [ 1 ]'


def with_state(rest: str = "", strategy: str = "oldest { max_candidate_sequences: 4 }", state: str = STATE) -> str:
    return f"sequence_batching {{ {strategy} {CONTROLS % 'UINT64'} state {{ {state} {rest} }} }}"


def total(job: InferJob) -> Tensor:
    return Tensor.of("Y", job.request.inputs["X"].array + job.request.inputs["S"].array)


def adds(jobs: list[InferJob]) -> None:
    """Y and the state are the sum; a negative input is an error."""
    for job in jobs:
        if int(job.request.inputs["X"].array.item()) < 0:
            job.fail(SluiceError(ErrorCode.INTERNAL, "negative"))
        else:
            job.respond(InferResponse([total(job), total(job).renamed("T")]))


async def run(clients: Clients, name: str, of: int, flags: object = NONE, value: int = 1, **options: object) -> None:
    clients.submit(name, of, flags, value=value, **options)  # type: ignore[arg-type]
    await until(lambda: clients.model.num_in_flight == 0)


@pytest.mark.parametrize("strategy", ["oldest { }", "direct { }"])
async def test_a_request_gets_what_the_one_before_it_gave(strategy: str) -> None:
    clients = Clients(with_state(strategy=strategy), Computed(adds))
    await run(clients, "a1", 1, START, 5)
    await run(clients, "b1", 2, START, 100)
    await run(clients, "a2", 1, NONE, 7)
    await run(clients, "b2", 2, END, 11)
    await run(clients, "a3", 1, END, 1)
    assert [clients.value(name) for name in ("a1", "b1", "a2", "b2", "a3")] == [5, 100, 12, 111, 13]


async def test_clients_do_not_see_states() -> None:
    instance = Computed(adds)
    clients = Clients(with_state(), instance)
    await run(clients, "a1", 1, START)
    await run(clients, "a2", 1, outputs=("Y",))
    assert [tensor.name for name in ("a1", "a2") for tensor in clients.responses[name].outputs] == ["Y", "Y"]
    assert [job.request.requested_outputs for batch in instance.batches for job in batch] == [("Y", "T")] * 2


async def test_a_state_that_is_an_output_too_is_seen_by_who_asks() -> None:
    declared = CONFIG + 'output { name: "T" data_type: TYPE_INT32 dims: [ 1 ] }'
    clients = Clients(with_state(), Computed(adds), base=declared)
    seen = []
    for flags, outputs in ((START, ()), (NONE, ("T",)), (NONE, ("Y",)), (END, ())):
        await run(clients, "a", 1, flags, outputs=outputs)
        seen.append([(tensor.name, int(tensor.array.item())) for tensor in clients.responses["a"].outputs])
    assert seen[0] == [("Y", 1), ("T", 1)]
    assert ("T", 2) in seen[1]
    assert ("T", 3) not in seen[2]
    assert seen[3] == [("Y", 4), ("T", 4)]


async def test_clients_neither_send_states_nor_ask_for_them() -> None:
    clients = Clients(with_state(), Computed(adds))
    with pytest.raises(SluiceError, match="unexpected inference output 'T' for model 'sums'"):
        clients.submit("a", 1, START, outputs=("T",))
    tensors = {name: Tensor.of(name, np.ones((1, 1), np.int32)) for name in ("X", "S")}
    with pytest.raises(SluiceError, match=r"expected 1 inputs but got 2 inputs for model 'sums'"):
        clients.model.submit(InferRequest(tensors, correlation_id=1, sequence=START), clients.receive)


async def test_a_failed_request_changes_no_state() -> None:
    clients = Clients(with_state(), Computed(adds))
    await run(clients, "a1", 1, START, 5)
    await run(clients, "bad", 1, NONE, -1)
    await run(clients, "a2", 1, NONE, 7)
    assert clients.errors["bad"].message == "negative"
    assert clients.value("a2") == 12


async def test_a_stream_that_fails_changes_no_state_and_one_that_ends_well_does() -> None:
    totals = []

    def streams(jobs: list[InferJob]) -> None:
        for job in jobs:
            totals.append(int(total(job).array.item()))
            job.respond(InferResponse([total(job), total(job).renamed("T")], is_final=False))
            if int(job.request.inputs["X"].array.item()) > 50:
                job.fail(SluiceError(ErrorCode.INTERNAL, "too large"))
            else:
                job.respond(InferResponse())

    decoupled = CONFIG + "model_transaction_policy { decoupled: true }"
    clients = Clients(with_state(), Computed(streams), base=decoupled)
    for name, flags, value in (("a1", START, 5), ("a2", NONE, 99), ("a3", NONE, 6), ("a4", END, 0)):
        await run(clients, name, 1, flags, value)
    assert clients.answered == ["a1", "a1", "a2", "a2", "a3", "a3", "a4", "a4"]
    assert set(clients.errors) == {"a2"}
    assert totals == [5, 104, 11, 11]


async def test_the_state_is_not_the_memory_that_the_backend_gave() -> None:
    memory = np.zeros((1, 1), np.int32)

    def reuses(jobs: list[InferJob]) -> None:
        for job in jobs:
            memory[:] = total(job).array
            job.respond(InferResponse([total(job), Tensor.of("T", memory)]))

    clients = Clients(with_state(), Computed(reuses))
    await run(clients, "a1", 1, START, 5)
    memory[:] = 1000
    await run(clients, "a2", 1, NONE, 7)
    assert clients.value("a2") == 12


async def test_a_filler_has_a_state_of_zeros_and_leaves_its_sequence_alone() -> None:
    instance = Computed(adds)
    clients = Clients(with_state(strategy="direct { }"), instance)
    for number in (1, 2):
        clients.submit(f"{number}", number, START, value=10 * number)
    await until(lambda: clients.model.num_in_flight == 0)
    await run(clients, "second", 2, NONE, 3)
    filler, _ = instance.batches[-1]
    assert filler.request.inputs["S"].array.tolist() == [[0]]
    assert control(filler, "READY") is False
    await run(clients, "first", 1, NONE, 1)
    assert (clients.value("second"), clients.value("first")) == (23, 11)


async def test_states_of_other_sizes_are_not_stacked() -> None:
    def grows(jobs: list[InferJob]) -> None:
        assert len({job.request.inputs["S"].shape for job in jobs}) == 1
        for job in jobs:
            longer = np.concatenate([job.request.inputs["S"].array, job.request.inputs["X"].array], axis=1)
            job.respond(InferResponse([Tensor.of("Y", longer.sum(1, keepdims=True)), Tensor.of("T", longer)]))

    instance = Computed(grows)
    state = STATE.replace("dims: [ 1 ]", "dims: [ -1 ]")
    clients = Clients(with_state(state=state), instance)
    await run(clients, "a1", 1, START, 1)
    clients.submit("a2", 1, value=2)
    clients.submit("b1", 2, START, value=3)
    await until(lambda: clients.model.num_in_flight == 0)
    clients.submit("a3", 1, value=4)
    clients.submit("c1", 3, START, value=5)
    await until(lambda: clients.model.num_in_flight == 0)
    assert [clients.value(name) for name in ("a1", "a2", "b1", "a3", "c1")] == [1, 3, 3, 7, 5]
    assert len(instance.batches) == 5


def source(text: str, folder: Path = Path("/nowhere")) -> ModelSource:
    return ModelSource(folder, 1, config_of(f"sequence_batching {{ {text} }}", CONFIG))


def state(rest: str, data_type: str = "INT32", dims: str = "2, -1") -> str:
    return f'state {{ input_name: "S" output_name: "T" data_type: TYPE_{data_type} dims: [ {dims} ] {rest} }}'


def initial(rest: str, data_type: str = "INT32", dims: str = "2, 3") -> str:
    return f'initial_state {{ name: "i" data_type: TYPE_{data_type} dims: [ {dims} ] {rest} }}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(state(""), [[[0], [0]]], id="without an initial state it is zeros, and sizes left open are one"),
        pytest.param(state("", "STRING"), [[[b""], [b""]]], id="texts are empty"),
        pytest.param(state(initial("zero_data: true")), [[[0, 0, 0], [0, 0, 0]]], id="zeros of the shape given"),
        pytest.param(state(initial('data_file: "numbers"')), [[[0, 1, 2], [3, 4, 5]]], id="numbers of a longer file"),
        pytest.param(
            state(initial('data_file: "texts"', "STRING", "2, 1"), "STRING"), [[[b"a"], [b"bc"]]], id="texts of a file"
        ),
    ],
)
def test_what_a_state_begins_with(tmp_path: Path, text: str, expected: object) -> None:
    folder = tmp_path / "initial_state"
    folder.mkdir()
    (folder / "numbers").write_bytes(struct.pack("<7i", *range(7)))
    (folder / "texts").write_bytes(b"\1\0\0\0a\2\0\0\0bc")
    assert read_initial_states(source(text, tmp_path))["S"].array.tolist() == expected


async def test_sequences_begin_with_the_data_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "hundred").write_bytes(struct.pack("<i", 100))
    given = initial('data_file: "hundred"', dims="1")
    clients = Clients(with_state(given), Computed(adds), folder=tmp_path)
    await run(clients, "a1", 1, START, 5)
    await run(clients, "a2", 1, END, 5)
    await run(clients, "a3", 1, START | END, 1)
    assert [clients.value(name) for name in ("a1", "a2", "a3")] == [105, 110, 101]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (state(initial("zero_data: true") + initial("zero_data: true")),
         "initial_state field for state input 'S' must contain exactly one or zero element. Found '2' elements."),
        (state(initial("zero_data: true", "INT64")),
         "The data type used for 'initial_state' field of state 'S' does not match the state data type."),
        (state(initial("zero_data: true").replace('name: "i"', "")),
         "Field 'name' must be set when using initial_state for state input 'S'."),
        (state(initial("zero_data: true", dims="2")),
         "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input 'S'. "
         "1 != 2"),
        (state(initial("zero_data: true", dims="2, -1")),
         "'initial_state' field for state input name 'S' contains variable dimensions."),
        (state(initial("zero_data: true", dims="4, 3")),
         "'initial_state' dim for input name 'S' doesn't match 'state' dim description. 4 != 2"),
        (state(initial("")), "initial_state setting expects state'S' to have state_data set"),
        (state(initial('data_file: "../secret"')), "'../secret' is not a path inside a model's folder"),
        (state("") + state(""), "State input name 'S' specified more than once."),
        (state("").replace('"S"', '""'), "sequence batching state must specify 'input_name'"),
        (state("", "INVALID"), "sequence batching state 'S' has data_type TYPE_INVALID"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_tritons_words(text: str, message: str) -> None:
    with pytest.raises(SluiceError) as caught:
        read_initial_states(source(text))
    assert (caught.value.code, caught.value.message) == (ErrorCode.INVALID, message)


def test_a_file_that_is_missing_too_short_or_broken(tmp_path: Path) -> None:
    folder = tmp_path / "initial_state"
    folder.mkdir()
    (folder / "short").write_bytes(bytes(8))
    for name, data_type, words in (
        ("none", "INT32", f"failed to open text file for read {folder / 'none'}: No such file or directory"),
        ("short", "INT32", "expects 24 bytes, but the data provided from short only has 8 bytes"),
        ("short", "STRING", "initial_state of state input 'S' in short: expected 6 string elements, got 2"),
    ):
        with pytest.raises(SluiceError, match=words):
            read_initial_states(source(state(initial(f'data_file: "{name}"', data_type), data_type), tmp_path))

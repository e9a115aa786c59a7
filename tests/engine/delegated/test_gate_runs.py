"""The gate in front of TensorRT-LLM's capacity rule: physical blocks, a shared one held once; from 1.3 on a candidate
has credit for blocks that others hold. And in front of vLLM's, which evicts where blocks run out."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.delegated.admission import BlockSharing
from tests.stand_ins.gated_runs import EvictingRun, GatedRun, shared_prefix_workload
from tests.stand_ins.scheduler_traces import Request, Workload
from tests.stand_ins.workloads import BLOCK, workloads

RULES = {True: BlockSharing.AWAITED, False: BlockSharing.RUNNING}
"""How the gate counts, by whether candidates have credit."""


@settings(max_examples=40)
@given(workload=workloads())
def test_behind_the_gate_every_request_ends(workload: Workload) -> None:
    GatedRun(workload, RULES[workload.has_credit]).run()


@settings(max_examples=40)
@given(workload=workloads())
def test_the_gate_keeps_vllm_from_running_out_of_blocks(workload: Workload) -> None:
    EvictingRun(workload, BlockSharing.AWAITED).run()


@settings(max_examples=40)
@given(workload=workloads(), most_chunk=st.integers(1, 16))
def test_the_gate_keeps_vllm_from_running_out_of_blocks_where_prompts_run_side_by_side(
    workload: Workload, most_chunk: int
) -> None:
    EvictingRun(workload, BlockSharing.COMPUTED, most_chunk=most_chunk).run()


def test_two_that_compute_a_prefix_side_by_side_have_two_in_vllm() -> None:
    """So a gate that counted it once would let in too many."""
    requests = [Request(number, 0, 33, 4, 4, num_alike=32) for number in range(3)]
    workload = Workload(
        name="side by side", tokens_per_block=BLOCK, num_blocks=16, max_num_tokens=16, requests=requests, reuses=True
    )
    with pytest.raises(AssertionError, match="blocks are needed"):
        EvictingRun(workload, BlockSharing.AWAITED, most_chunk=8).run()
    EvictingRun(workload, BlockSharing.COMPUTED, most_chunk=8).run()


@pytest.mark.parametrize("has_credit", RULES)
@pytest.mark.parametrize(("num_alike", "at_least"), [(0, 1.0), (1024, 1.9), (4096, 3.8)])
def test_the_batch_is_as_full_as_without_a_gate(num_alike: int, at_least: float, has_credit: bool) -> None:
    """The sum of all worst cases makes it several times as long."""
    workload = shared_prefix_workload(num_alike, 32, has_credit=has_credit)
    alone = GatedRun(workload, None).run()
    assert GatedRun(workload, RULES[has_credit]).run() == alone
    assert GatedRun(workload, BlockSharing.NONE, takes_early=True).run() >= at_least * alone


def test_without_requests_in_advance_a_free_place_waits_for_a_step() -> None:
    """It costs less than a percent of the steps of answers with 64 tokens."""
    short = [Request(number, 0, 64, 64, 1 + number * 37 % 64) for number in range(192)]
    workload = msgspec.structs.replace(shared_prefix_workload(0, 0, has_credit=True), requests=short)
    early, late = (
        GatedRun(workload, BlockSharing.AWAITED, takes_early=early, sees_late=True).run() for early in (True, False)
    )
    assert early < late <= early * 1.05


def test_a_request_in_advance_can_lock_tensorrt_llm_up() -> None:
    """The second waits for the first one's prefix while the third begins; then it does not fit, and goes before the
    third."""
    requests = [
        Request(0, 0, 9, 1, 1, family=1, num_alike=4),
        Request(1, 0, 18, 7, 1, family=1, num_alike=4),
        Request(2, 0, 9, 1, 1),
    ]
    workload = Workload(
        name="lock-up", max_batch_size=3, max_num_tokens=8, tokens_per_block=BLOCK, num_blocks=9, requests=requests,
        chunking="FIRST_COME_FIRST_SERVED", max_steps=300, reuses=True, has_credit=True,
    )  # fmt: skip
    with pytest.raises(TimeoutError, match=r"requests \[1, 2\] do not end"):
        GatedRun(workload, BlockSharing.AWAITED, takes_early=True).run()
    assert GatedRun(workload, BlockSharing.AWAITED).run() < 20

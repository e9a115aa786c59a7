"""Workloads that hypothesis draws."""

from hypothesis import strategies as st

from tests.stand_ins.scheduler_traces import Request, Workload

BLOCK = 4
"""Tokens of a block."""


@st.composite
def workloads(draw: st.DrawFn, *, has_chunks: bool = True, always_has_credit: bool = False) -> Workload:
    """Draw requests of two families in a small cache, which each of them fits: with early ends, cancellations, prompts
    that end with a block, and, with `has_chunks`, steps that are too small for all contexts."""
    num_blocks = draw(st.integers(8, 24))
    requests = []
    for number in range(draw(st.integers(2, 20))):
        num_alike = draw(st.sampled_from([0, 1, 2, 4, 4])) * BLOCK
        num_own = draw(st.integers(1, 12))
        max_tokens = draw(st.integers(1, min(12, num_blocks * BLOCK - num_alike - num_own)))
        arrival = draw(st.integers(0, 3))
        cancelled_at = draw(st.none() | st.integers(arrival, arrival + 12))
        num_output, family = draw(st.integers(1, max_tokens)), draw(st.integers(0, 1))
        requests.append(
            Request(number, arrival, num_alike + num_own, max_tokens, num_output, cancelled_at, family, num_alike)
        )
    return Workload(
        name="drawn",
        max_batch_size=draw(st.integers(1, 6)),
        max_num_tokens=draw(st.sampled_from([8, 16, 64])) if has_chunks else 4096,
        tokens_per_block=BLOCK,
        num_blocks=num_blocks,
        chunking="FIRST_COME_FIRST_SERVED" if has_chunks else "",
        requests=sorted(requests, key=lambda each: each.arrival),
        max_steps=600,
        reuses=True,
        has_credit=always_has_credit or draw(st.booleans()),
    )

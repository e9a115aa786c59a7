from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.batching.rate_limiter import Claim, RateLimiter, parse_resource, parse_resources
from sluice.serving.instance import Placement, Resource


def ignore_wake() -> None:
    """Stay asleep: the tests try again by themselves."""


def claim_of(limiter: RateLimiter, *, priority: int = 0, gpu: int | None = None, **needs: int) -> Claim:
    """Return the claim of an instance with these needs. A resource whose name begins with `g_` is global."""
    resources = tuple(Resource(name, count, name.startswith("g_")) for name, count in needs.items())
    return limiter.claim(Placement("i", gpu=gpu, resources=resources, priority=priority), ignore_wake)


class TestHowMuchThereIs:
    def test_as_much_as_any_instance_needs(self) -> None:
        limiter = RateLimiter()
        claim_of(limiter, R1=4, R2=4)
        large = claim_of(limiter, R2=5, R3=10, R4=5)
        claim_of(limiter, R1=1, R3=7, R4=2)
        assert [limiter.free((name, 0)) for name in ("R1", "R2", "R3", "R4")] == [4, 5, 10, 5]
        large.close()
        assert [limiter.free((name, 0)) for name in ("R1", "R2", "R3", "R4")] == [4, 4, 7, 2]

    def test_what_the_command_line_says(self) -> None:
        limiter = RateLimiter(parse_resources(["R1:10", "R2:5:0", "R2:8:1", "g_R3:2", "R4:3"]))
        for gpu in (0, 1):
            claim_of(limiter, gpu=gpu, R1=1, R2=1, g_R3=1, R4=3)
        assert [limiter.free((name, 0)) for name in ("R1", "R2", "R4")] == [10, 5, 3]
        assert [limiter.free((name, 1)) for name in ("R1", "R2", "R4")] == [10, 8, 3]
        assert limiter.free(("g_R3", None)) == 2

    def test_a_device_given_for_a_global_resource_does_not_matter(self) -> None:
        limiter = RateLimiter(parse_resources(["g_R:2:5"]))
        claim_of(limiter, g_R=1)
        assert limiter.free(("g_R", None)) == 2

    def test_an_instance_on_the_cpu_takes_of_device_0(self) -> None:
        limiter = RateLimiter(parse_resources(["R:5:0"]))
        assert claim_of(limiter, R=2).take()
        assert limiter.free(("R", 0)) == 3

    def test_who_could_never_run_is_refused(self) -> None:
        limiter = RateLimiter({("R", None): 3})
        with pytest.raises(SluiceError) as refused:
            claim_of(limiter, R=4)
        assert refused.value.code is ErrorCode.INVALID
        assert refused.value.message == (
            'Resource count for "R" is limited to 3 which will prevent scheduling of one or more model instances, the '
            "minimum required count is 4"
        )
        assert claim_of(limiter, R=3).take()

    def test_where_some_are_given_the_others_are_not_there(self) -> None:
        limiter = RateLimiter({("R", None): 3})
        with pytest.raises(SluiceError, match='Resource count for "r" is limited to 0'):
            claim_of(limiter, r=1)

    def test_a_resource_is_global_or_each_devices(self) -> None:
        limiter = RateLimiter()
        claim_of(limiter, g_R=1)
        with pytest.raises(SluiceError, match="present as both global and device-specific"):
            limiter.claim(Placement("i", resources=(Resource("g_R", 1),)), ignore_wake)

    @pytest.mark.parametrize("text", ["", "R", "R:", ":1", "R:x", "R:1:2:3", "R:-1", "R:1:x"])
    def test_what_is_no_resource(self, text: str) -> None:
        with pytest.raises(SluiceError, match="--rate-limit-resource option format is"):
            parse_resource(text)


class TestWhoIsNext:
    def test_devices_have_their_own_and_global_resources_are_shared(self) -> None:
        limiter = RateLimiter()
        one, two = (claim_of(limiter, gpu=gpu, R=1) for gpu in (0, 1))
        assert one.take() and two.take()
        first, second = (claim_of(limiter, gpu=gpu, g_S=1) for gpu in (0, 1))
        assert first.take() and not second.take()

    def test_who_waits_for_much_is_not_starved_by_who_needs_little(self) -> None:
        limiter = RateLimiter({("R", None): 4})
        small = [claim_of(limiter, R=1) for _ in range(3)]
        large = claim_of(limiter, R=4)
        assert small[0].take() and not large.take()
        assert not small[1].take()
        small[0].release()
        assert large.take()
        large.release()
        assert small[1].take()

    def test_what_the_first_in_line_does_not_need_goes_to_others(self) -> None:
        limiter = RateLimiter({("R", None): 4, ("S", None): 4, ("T", None): 1})
        busy, first = claim_of(limiter, R=3), claim_of(limiter, R=2, S=3)
        assert busy.take() and not first.take()
        assert claim_of(limiter, S=1).take()
        assert not claim_of(limiter, S=1).take()
        assert claim_of(limiter, T=1).take()
        busy.release()
        assert first.take()

    def test_priority_2_gets_half_the_turns_of_priority_1(self) -> None:
        turns = run_turns(RateLimiter(), [1, 2, 4], 700)
        assert [turns[number] for number in range(3)] == pytest.approx([400, 200, 100], abs=2)

    def test_who_comes_later_saves_up_no_turns(self) -> None:
        limiter = RateLimiter()
        first = claim_of(limiter, R=1)
        for _ in range(1000):
            assert first.take()
            first.release()
        turns = run_turns(limiter, [1, 1], 100)
        assert turns[0] == pytest.approx(50, abs=1)
        assert first.take()

    async def test_waiting_ends_when_others_release(self) -> None:
        limiter = RateLimiter()
        busy, waiting = claim_of(limiter, R=1), claim_of(limiter, R=1)
        assert busy.take()
        busy.release()
        await waiting.acquire()
        assert not busy.take()
        busy.withdraw()


def run_turns(limiter: RateLimiter, priorities: list[int], count: int) -> Counter[int]:
    """How often each got the one resource that all always want."""
    claims = [claim_of(limiter, R=1, priority=priority) for priority in priorities]
    turns: Counter[int] = Counter()
    for _ in range(count):
        (runs,) = [number for number, claim in enumerate(claims) if claim.take()]
        turns[runs] += 1
        claims[runs].release()
    for claim in claims:
        claim.withdraw()
    return turns


class Worker:
    """Wants so many turns, and takes each as soon as the limiter says."""

    def __init__(self, limiter: RateLimiter, placement: Placement, num_turns: int) -> None:
        self.left = num_turns
        self._limiter = limiter
        self.claim = limiter.claim(placement, self.want)

    def want(self) -> None:
        if self.left and not self.claim.is_granted and self.claim.take():
            assert all(self._limiter.free(key) >= 0 for key in self.claim.needs), "over-committed"
            self.left -= 1


PLACEMENTS = st.builds(
    Placement,
    name=st.just("i"),
    gpu=st.sampled_from([None, 0, 1]),
    priority=st.integers(0, 3),
    resources=st.lists(
        st.one_of(
            st.builds(Resource, st.sampled_from("RST"), st.integers(0, 5)),
            st.builds(Resource, st.sampled_from("GH"), st.integers(0, 5), st.just(True)),
        ),
        max_size=3,
        unique_by=lambda each: each.name,
    ).map(tuple),
)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(PLACEMENTS, st.integers(1, 6)), min_size=1, max_size=8),
    st.dictionaries(st.tuples(st.sampled_from("RSTGH"), st.sampled_from([None, 0, 1])), st.integers(5, 9)).map(
        lambda given: {**{(name, None): 5 for name in "RSTGH"}, **given} if given else given
    ),
    st.randoms(use_true_random=False),
)
def test_never_over_committed_and_everybody_gets_all_turns(
    wanted: list[tuple[Placement, int]], counts: dict[tuple[str, int | None], int], chance: Random
) -> None:
    limiter = RateLimiter(counts)
    workers = [Worker(limiter, placement, num_turns) for placement, num_turns in wanted]
    for worker in workers:
        worker.want()
    while running := [worker for worker in workers if worker.claim.is_granted]:
        worker = chance.choice(running)
        if chance.random() < 0.1:
            workers.remove(worker)
            worker.claim.close()
        else:
            worker.claim.release()
            worker.want()
            limiter.grant_waiting()
    assert all(worker.left == 0 for worker in workers)
    for worker in workers:
        worker.claim.close()
    assert limiter.is_idle

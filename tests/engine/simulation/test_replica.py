"""A simulated replica beside the engine's own loop, whose steps take what the same costs say."""

import random
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from sluice.engine.blocks import BlockHash
from sluice.engine.config import EngineConfig, SchedulerPolicy
from sluice.engine.fleet.router import ReplicaView, RouterSettings, RoutingPolicy
from sluice.engine.frames import Command, StepFrame, Submit
from sluice.engine.loop.executor import InflightExecutor
from sluice.engine.runners.base import Runner, RunnerInfo, StepBatch
from sluice.engine.sampling.host_logits import HostLogits
from sluice.engine.simulation.fleet import FleetConfig, SimulatedRouter, simulate
from sluice.engine.simulation.profile import ReplicaProfile, StepCosts
from sluice.engine.simulation.traces import TracedRequest
from sluice.engine.types import GenerateRequest, SamplingParams

COSTS = StepCosts(step_s=0.004, prefill_token_s=5e-5, decode_seq_s=2e-4, context_token_s=2e-7, attention_s=1e-9)
PROFILE = ReplicaProfile(costs=COSTS, num_blocks=56, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=2048)
VOCABULARY = 64


class Clocked(Runner):
    """A runner whose steps take what COSTS say, on a clock of its own, which is also the source of requests."""

    def __init__(self, requests: list[tuple[float, GenerateRequest]]) -> None:
        self.now = 0.0
        self.info = RunnerInfo(
            runtime="clocked",
            model_type="clocked",
            dtype="f32",
            vocab_size=VOCABULARY,
            eos_token_ids=(),
            max_model_len=PROFILE.max_model_len,
            block_size=PROFILE.block_size,
            num_blocks=PROFILE.num_blocks,
        )
        self._due = deque(enumerate(requests))

    def clock(self) -> float:
        return self.now

    def run(self, batch: StepBatch) -> HostLogits:
        lengths, past = np.diff(batch.subsequence_begins), batch.past_lens
        is_decode = lengths == 1
        attention = lengths * (past + lengths // 2)
        self.now += COSTS.seconds(
            int(lengths[~is_decode].sum()),
            int(is_decode.sum()),
            int(past[is_decode].sum()),
            int(attention[~is_decode].sum()),
        )
        return HostLogits(np.zeros((len(batch.sampled_rows), VOCABULARY), np.float32))

    def receive(self, timeout_s: float) -> list[Command]:
        if timeout_s > 0 and self._due:
            self.now = max(self.now, self._due[0][1][0])
        commands: list[Command] = []
        while self._due and self._due[0][1][0] <= self.now:
            number, (_, request) = self._due.popleft()
            commands.append(Submit(number, request))
        return commands

    def close(self) -> None:
        """Do nothing."""


def served_by_the_engine(requests: list[TracedRequest], policy: SchedulerPolicy) -> tuple[list[list[float]], int, int]:
    """Return the times of each request's tokens, the cached tokens of all, and the preemptions."""
    submitted = []
    for number, request in enumerate(requests):
        tokens: list[int] = []
        for name, count in request.parts:
            tokens += [int(name)] * count
        own = random.Random(number).choices(range(VOCABULARY), k=request.num_prompt - len(tokens))
        sampling = SamplingParams(max_tokens=request.num_output, temperature=0.0, ignore_eos=True)
        generate = GenerateRequest(request_id="", prompt_token_ids=tokens + own, sampling=sampling)
        submitted.append((request.at_s, generate))
    times: list[list[float]] = [[] for _ in requests]
    runner = Clocked(submitted)

    def take(frame: StepFrame) -> None:
        assert not frame.failures
        for event in frame.events:
            times[event.stream_id] += [runner.now] * len(event.token_ids)

    config = EngineConfig(
        model_path="",
        max_num_seqs=PROFILE.max_num_seqs,
        max_num_batched_tokens=PROFILE.max_num_batched_tokens,
        chooses_chunk=True,
        scheduler_policy=policy,
        max_queued_requests=10_000,
    )
    executor = InflightExecutor(runner, config, runner.receive, take, runner.clock)
    while any(len(got) < request.num_output for got, request in zip(times, requests, strict=True)):
        executor.step()
    stats = executor.stats()
    return times, stats.cached_tokens_total, stats.preemptions_total


def trace(rate: float, seed: int) -> list[TracedRequest]:
    rng, at_s, requests = random.Random(seed), 0.0, []
    for _ in range(120):
        parts = ((str(rng.randrange(4)), 32 * rng.randint(2, 8)),)
        num_prompt = parts[0][1] + rng.randint(1, 300)
        requests.append(TracedRequest(at_s, num_prompt, rng.randint(1, 120), parts))
        at_s += rng.expovariate(rate)
    return requests


@pytest.mark.parametrize("policy", list(SchedulerPolicy))
@pytest.mark.parametrize(
    "rate", [pytest.param(4.0, marks=pytest.mark.long, id="idle at times"), pytest.param(30.0, id="overloaded")]
)
def test_it_takes_the_time_that_the_engine_takes(rate: float, policy: SchedulerPolicy) -> None:
    requests = trace(rate, seed=1)
    times, num_cached, num_preempted = served_by_the_engine(requests, policy)
    assert (num_preempted > 0) == (policy is SchedulerPolicy.MAX_UTILIZATION and rate > 10.0)
    run = simulate(requests, FleetConfig(PROFILE, 1, policy=policy))
    ttft_s = np.array([got[0] - request.at_s for got, request in zip(times, requests, strict=True)])
    e2e_s = np.array([got[-1] - request.at_s for got, request in zip(times, requests, strict=True)])
    assert run.ttft_s.mean() == pytest.approx(ttft_s.mean(), rel=0.05)
    assert run.e2e_s.mean() == pytest.approx(e2e_s.mean(), rel=0.03)
    assert run.end_s == pytest.approx(max(got[-1] for got in times), rel=0.02)
    assert run.num_cached.sum() == pytest.approx(num_cached, rel=0.05)
    gaps = np.concatenate([np.diff(got) for got in times])
    assert run.gaps.num_gaps == len(gaps)
    assert run.gaps.mean_s == pytest.approx(gaps.mean(), rel=0.03)
    assert run.gaps.quantile(0.5) == pytest.approx(np.quantile(gaps, 0.5), rel=0.05)


def test_steps_taken_together_are_those_taken_one_by_one() -> None:
    """One request alone: its times follow from the costs."""
    run = simulate([TracedRequest(0.0, 100, 50)], FleetConfig(PROFILE, 1))
    prefill_s = COSTS.seconds(100, 0, 0, 100 * 50)
    steps_s = [COSTS.seconds(0, 1, 100 + place, 0) for place in range(49)]
    assert run.ttft_s[0] == pytest.approx(prefill_s)
    assert run.e2e_s[0] == pytest.approx(prefill_s + sum(steps_s))
    assert run.totals[0].num_steps == 50


def test_replicas_that_share_cores_slow_each_other_down_while_both_are_in_steps() -> None:
    alone = simulate([TracedRequest(0.0, 100, 100)], FleetConfig(PROFILE, 1))
    profile = msgspec.structs.replace(PROFILE, slowdown=1.0)
    router = RouterSettings(policy=RoutingPolicy.ROUND_ROBIN)
    two = simulate([TracedRequest(0.0, 100, 100), TracedRequest(0.0, 100, 100)], FleetConfig(profile, 2, router))
    assert two.e2e_s == pytest.approx(2 * alone.e2e_s[0], rel=0.03)  # its first step began alone
    long = simulate([TracedRequest(0.0, 100, 300), TracedRequest(0.0, 100, 100)], FleetConfig(profile, 2, router))
    alone_long = simulate([TracedRequest(0.0, 100, 300)], FleetConfig(PROFILE, 1))
    assert long.e2e_s[0] == pytest.approx(alone_long.e2e_s[0] + alone.e2e_s[0], rel=0.03)
    assert long.e2e_s[1] == pytest.approx(2 * alone.e2e_s[0], rel=0.03)


def test_every_request_is_served_once_and_nothing_is_left() -> None:
    requests = trace(60.0, seed=2)
    for policy in RoutingPolicy:
        run = simulate(requests, FleetConfig(PROFILE, 3, RouterSettings(policy=policy)))
        assert not np.isnan(run.e2e_s).any()
        assert sum(each.num_requests for each in run.totals) == len(requests)
        num_computed = sum(each.num_computed_tokens for each in run.totals)
        assert num_computed + run.num_cached.sum() == sum(request.num_prompt for request in requests)
        assert run.gaps.num_gaps == sum(request.num_output - 1 for request in requests)


def test_the_same_arguments_give_the_same_run() -> None:
    requests = trace(60.0, seed=3)
    runs = [simulate(requests, FleetConfig(PROFILE, 4)) for _ in range(2)]
    assert (runs[0].replica == runs[1].replica).all()
    assert (runs[0].e2e_s == runs[1].e2e_s).all()


class Listening(SimulatedRouter):
    """A router in turn that notes what it is told."""

    name = "listening"

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.stored: dict[int, set[bytes]] = {0: set(), 1: set()}

    def choose(
        self,
        number: int,
        request: TracedRequest,
        hashes: Sequence[BlockHash],
        replicas: Sequence[ReplicaView],
        now: float,
    ) -> int:
        self.heard.append(("choose", number))
        return number % len(replicas)

    def note_changes(self, replica: int, stored: bytes, removed: bytes) -> None:
        self.stored[replica] |= {stored[begin : begin + 16] for begin in range(0, len(stored), 16)}

    def note_first_token(self, number: int) -> None:
        self.heard.append(("first", number))

    def note_end(self, number: int) -> None:
        self.heard.append(("end", number))


def test_another_router_chooses_and_hears_what_becomes_of_each_request() -> None:
    requests = [TracedRequest(0.01 * number, 100, 20) for number in range(6)]
    router = Listening()
    run = simulate(requests, FleetConfig(PROFILE, 2), router=router)
    assert run.router == "listening"
    assert run.replica.tolist() == [0, 1, 0, 1, 0, 1]
    for number in range(len(requests)):
        assert [kind for kind, of in router.heard if of == number] == ["choose", "first", "end"]
    assert all(len(stored) == 3 * 3 for stored in router.stored.values()), "three full blocks of each of three prompts"


def test_a_request_that_can_never_fit_is_rejected() -> None:
    requests = [TracedRequest(0.0, 2000, 100), TracedRequest(0.0, 100, 10)]
    run = simulate(requests, FleetConfig(PROFILE, 2))
    assert run.replica.tolist()[0] == -1
    assert np.isnan(run.ttft_s[0])
    assert run.e2e_s[1] > 0.0


def test_clients_send_their_next_request_when_their_last_has_ended() -> None:
    requests = trace(60.0, seed=4)
    run = simulate(requests, FleetConfig(PROFILE, 1), concurrency=5)
    begins = np.array([request.at_s for request in run.requests])
    ends = begins + run.e2e_s
    in_flight = [int(((begins <= at) & (ends > at)).sum()) for at in begins]
    assert max(in_flight) == 5
    assert in_flight[10:-5] == [5] * (len(requests) - 15)
    assert [request.num_prompt for request in run.requests] == [request.num_prompt for request in requests]


def test_one_client_waits_for_each_answer() -> None:
    requests = trace(60.0, seed=5)
    run = simulate(requests, FleetConfig(PROFILE, 1), concurrency=1)
    assert run.end_s == pytest.approx(run.e2e_s.sum())
    assert run.wait_s.max() < 1e-9

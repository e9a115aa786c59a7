"""Workloads behind our gate: requests wait in a queue, and reach TensorRT-LLM's schedulers when the gate lets them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sluice.engine.blocks import BlockHash, HashChain, blocks_for
from sluice.engine.config import SchedulerPolicy
from sluice.engine.delegated.admission import BlockSharing, RuntimeCapacity, RuntimeGate
from sluice.engine.delegated.tensorrt_llm.blocks import blocks_to_completion
from sluice.engine.scheduling.planner import find_policy
from tests.stand_ins.scheduler_traces import Request, Simulation, Step, Workload, schedule_as_stand_in
from tests.stand_ins.tensorrt_llm._stand_in.schedulers import Load, Stage


@dataclass(eq=False)
class Holder:
    """A request as the gate sees it."""

    request: Request
    block_size: int
    prompt_hashes: Sequence[BlockHash] = field(init=False)
    num_allocated_blocks: int = 1

    def __post_init__(self) -> None:
        token_ids, size = self.request.token_ids, self.block_size
        self.prompt_hashes = HashChain("", size).hashes(token_ids, (len(token_ids) - 1) // size)

    @property
    def worst_case_blocks(self) -> int:
        return blocks_to_completion(self.request.num_prompt, self.request.max_tokens, 1, self.block_size)


def make_gate(workload: Workload, sharing: BlockSharing, *, takes_early: bool) -> RuntimeGate[Holder]:
    policy = find_policy(SchedulerPolicy.GUARANTEED_NO_EVICT)
    capacity = RuntimeCapacity(workload.max_batch_size, workload.num_blocks, policy, takes_early, sharing)
    return RuntimeGate(capacity)


class GatedRun:
    """Runs a workload under TensorRT-LLM's GUARANTEED_NO_EVICT, step by step, behind the gate or without one."""

    def __init__(
        self,
        workload: Workload,
        sharing: BlockSharing | None,
        *,
        takes_early: bool = False,
        sees_late: bool = False,
    ) -> None:
        """Without `sharing` there is no gate. One that `sees_late` learns of a step when the next one has begun."""
        self.simulation = Simulation(workload)
        self._num_never_begun = 0
        """Requests that were cancelled before the runtime had them."""
        self._workload = workload
        self._sees_late = sees_late
        self._gate = None if sharing is None else make_gate(workload, sharing, takes_early=takes_early)
        self._queue: list[Holder] = []
        self._in_flight: dict[int, Holder] = {}

    def run(self) -> int:
        """Return how many steps it takes. Raises TimeoutError where it takes more than `max_steps`."""
        simulation, workload = self.simulation, self._workload
        while len(simulation.finished_at) + self._num_never_begun < len(workload.requests):
            if simulation.number == workload.max_steps:
                raise TimeoutError(f"requests {sorted(simulation.active)} do not end")
            self._step()
        return simulation.number

    def _step(self) -> None:
        self._arrive()
        self.simulation.cancel()
        if not self._sees_late:
            self._follow()
        self._hand_over()
        self.simulation.look_up()
        step = self._schedule()
        if self._sees_late:
            self._follow()
        self.simulation.apply(step)

    def _schedule(self) -> Step:
        active = list(self.simulation.active.values())
        return schedule_as_stand_in(self._workload, active, self.simulation.num_free_blocks)

    def _arrive(self) -> None:
        """Queue the requests that arrive, and forget those that are cancelled in the queue."""
        number = self.simulation.number
        size = self._workload.tokens_per_block
        self._queue += [Holder(request, size) for request in self._workload.requests if request.arrival == number]
        left = [each for each in self._queue if each.request.cancelled_at != number]
        self._num_never_begun += len(self._queue) - len(left)
        self._queue = left

    def _hand_over(self) -> None:
        in_flight = list(self._in_flight.values())
        chosen = self._queue if self._gate is None else self._gate.choose(self._queue, in_flight)
        for holder in chosen:
            self._in_flight[holder.request.request_id] = holder
            self.simulation.hand_over(holder.request)
        self._queue = [each for each in self._queue if each.request.request_id not in self._in_flight]

    def _follow(self) -> None:
        """Tell the gate of those that have begun or ended."""
        for request_id, holder in list(self._in_flight.items()):
            load = self.simulation.active.get(request_id)
            if load is None:
                del self._in_flight[request_id]
                if self._gate is not None:
                    self._gate.shared.remove(holder)
            elif load.num_generated and self._gate is not None:
                self._gate.shared.begin(holder)


class EvictingRun(GatedRun):
    """Runs a workload as vLLM does: a request has blocks for what is computed and no more, and what two compute at the
    same time is there twice. Where blocks run out vLLM would evict; this run fails with an AssertionError."""

    def __init__(self, workload: Workload, sharing: BlockSharing, *, most_chunk: int | None = None) -> None:
        """`most_chunk` is `long_prefill_token_threshold`: with it several prompts are computed side by side."""
        super().__init__(workload, sharing)
        self._most_chunk = most_chunk or workload.max_num_tokens

    def _schedule(self) -> Step:
        """Those that run go first, in order, then those that begin, as far as there are tokens."""
        left, contexts, generations = self._workload.max_num_tokens, [], []
        for load in sorted(self.simulation.active.values(), key=lambda each: not each.held_per_beam):
            if not left:
                break
            if load.stage is Stage.FIRST_CHUNK:
                self._share(load)
            count = min(max(load.num_prompt - load.num_prefilled, 1), left, self._most_chunk)
            left -= count
            self._allocate(load, count)
            if load.stage is Stage.GENERATION:
                generations.append(load.request_id)
            else:
                contexts.append((load.request_id, count))
        return Step((), tuple(contexts), tuple(generations))

    def _share(self, load: Load) -> None:
        """Begin a request with the blocks of its prompt that are there."""
        prefix = self.simulation.kv_cache.find(self.simulation.contexts[load.request_id], 0)
        self.simulation.kv_cache.share(load.request_id, prefix)
        load.held_per_beam = len(prefix.blocks)
        load.num_prefilled = len(prefix.blocks) * self._workload.tokens_per_block

    def _allocate(self, load: Load, count: int) -> None:
        """Give a request the blocks for the next tokens, and let others find those that they fill, as vLLM does before
        it computes them."""
        cache, request_id, size = self.simulation.kv_cache, load.request_id, self._workload.tokens_per_block
        context = self.simulation.contexts[request_id]
        is_context = load.num_prefilled < load.num_prompt
        num_tokens = min(load.num_prefilled + count, load.num_prompt) if is_context else load.num_tokens
        needed = blocks_for(num_tokens, size)
        cache.grow(request_id, max(needed - load.held_per_beam, 0))
        load.held_per_beam = max(needed, load.held_per_beam)
        cache.store(request_id, context[: min(num_tokens, load.num_prompt) // size * size], 0)


def shared_prefix_workload(num_alike: int, num_requests: int, *, has_credit: bool) -> Workload:
    """Return requests that share a prefix of so many tokens, each with 64 of its own and 256 of output."""
    requests = [
        Request(number, number // 8, num_alike + 64, 256, 256, num_alike=num_alike) for number in range(num_requests)
    ]
    return Workload(
        name=f"prefix of {num_alike}", max_batch_size=64, max_num_tokens=8192, num_blocks=960, reuses=True,
        has_credit=has_credit, chunking="FIRST_COME_FIRST_SERVED", requests=requests, max_steps=20_000,
    )  # fmt: skip

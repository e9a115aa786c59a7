"""NVIDIA's schedulers in Python as an oracle: of the stand-in's, of our planner's admissions and of the gate.

They get doubles of requests and of the C++ cache manager, which answer by the rules of `cpp/tensorrt_llm/batch_manager`
for one window. A double that lacks what a newer scheduler asks for fails the test with that name.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import just

from sluice.engine.delegated.admission import BlockSharing
from sluice.engine.delegated.tensorrt_llm.blocks import CREDITS_SINCE
from tests.engine.scheduling.test_reference_traces import Planner, admitted
from tests.stand_ins.gated_runs import GatedRun
from tests.stand_ins.scheduler_traces import Simulation, Step, Workload, schedule_as_stand_in
from tests.stand_ins.tensorrt_llm._stand_in.schedulers import Load, Stage, remaining_blocks
from tests.stand_ins.workloads import workloads
from tests.tensorrt_llm_qa.bindings import LlmRequestState
from tests.tensorrt_llm_qa.loading import Checkout, Report, explain, load

NUM_TRACES = 300
_WINDOW = 1 << 20


class SchedulerRequest:
    """A request as NVIDIA's schedulers see it."""

    num_draft_tokens, has_draft_tokens, lora_task_id = 0, False, None
    is_encoder_init_state = is_disagg_generation_init_state = False

    def __init__(self, load: Load, context: list[int]) -> None:
        self.load, self._context = load, context
        self.request_id = self.py_request_id = load.request_id
        is_context = load.stage is not Stage.GENERATION
        self.state = LlmRequestState.CONTEXT_INIT if is_context else LlmRequestState.GENERATION_IN_PROGRESS
        self.state_value = self.state.value
        self.is_context_init_state, self.is_generation_in_progress_state = is_context, not is_context
        self.is_first_context_chunk = load.stage is Stage.FIRST_CHUNK
        self.context_remaining_length = self.context_chunk_size = load.num_prompt - load.num_prefilled

    @property
    def is_last_context_chunk(self) -> bool:
        return self.context_chunk_size == self.context_remaining_length

    def get_num_tokens(self, _: int) -> int:
        return len(self._context)

    def get_unique_tokens(self, _: int) -> list[int]:
        return self._context

    def get_beam_width_by_iter(self, for_next_iteration: bool = False) -> int:
        return 1


class CacheManager:
    """The cache manager over a simulation's cache."""

    is_variable_window = False
    max_attention_window_vec = (_WINDOW,)

    def __init__(self, workload: Workload, num_free: int) -> None:
        self._has_credit, self._num_free = workload.has_credit, num_free
        self.enable_block_reuse, self.tokens_per_block = workload.reuses, workload.tokens_per_block

    def get_kv_cache_stats(self) -> Any:
        return SimpleNamespace(num_free_blocks_per_window_size={_WINDOW: self._num_free})

    def get_remaining_blocks_to_completion(self, request: SchedulerRequest, _: int = 0) -> int:
        """Return them without what a candidate is credited for blocks that others hold, in versions that do so."""
        has_credit = self._has_credit and request.is_first_context_chunk
        return remaining_blocks(request.load, self.tokens_per_block) - has_credit * request.load.num_credited

    def get_remaining_blocks_to_completion_batch(self, requests: Sequence[SchedulerRequest], window: int) -> list[int]:
        return [self.get_remaining_blocks_to_completion(each, window) for each in requests]

    def find_new_context_block(self, _: Any, request: SchedulerRequest) -> int | None:
        return request.load.first_block


class Oracle:
    """NVIDIA's schedulers, asked about a simulation's state."""

    def __init__(self, checkout: Checkout) -> None:
        self._module = load(checkout.scheduler_module())
        self._policies = load("llmapi.llm_args").CapacitySchedulerPolicy

    def schedule(self, simulation: Simulation) -> Step:
        module, workload = self._module, simulation.workload
        requests = [SchedulerRequest(load, simulation.contexts[i]) for i, load in simulation.active.items()]
        capacity = module.PyCapacityScheduler(
            max_num_requests=workload.max_batch_size,
            kv_cache_manager=CacheManager(workload, simulation.num_free_blocks),
            scheduler_policy=self._policies(workload.policy),
        )
        chunking = None
        if workload.chunking:
            policy = module.ChunkingPolicy[workload.chunking]
            chunking = module.ContextChunkingConfig(policy, workload.tokens_per_block)
        fitting, _, paused = capacity.schedule_request(requests)
        limits = (workload.max_batch_size, workload.max_num_tokens, chunking)
        if hasattr(module, "PyMicroBatchScheduler"):
            contexts, generations = module.PyMicroBatchScheduler(*limits).schedule(fitting, set())
        else:  # newer versions count tokens while they look for room
            tracker = module.TokenBudgetTracker(*limits)
            capacity.schedule_request(requests, tracker)
            contexts, generations, _ = tracker.finalize()
        sizes = sorted((each.request_id, each.context_chunk_size) for each in contexts)
        ids = [tuple(each.request_id for each in group) for group in (fitting, generations, paused)]
        return Step(ids[0], tuple(sizes), ids[1], ids[2])


class _Gated(GatedRun):
    """A run behind the gate whose steps are NVIDIA's."""

    def __init__(self, oracle: Oracle, workload: Workload, sharing: BlockSharing) -> None:
        super().__init__(workload, sharing)
        self._oracle = oracle

    def _schedule(self) -> Step:
        return self._oracle.schedule(self.simulation)


def schedulers_agree(checkout: Checkout, _: Path, options: Any) -> Report:
    """Follow random traces, and ask all schedulers on one state each step; then run them behind the gate."""
    report, oracle, has_credit = Report(), Oracle(checkout), checkout.version >= CREDITS_SINCE
    few = settings(
        max_examples=max(round(NUM_TRACES * options.share), 1), derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip

    def follow(workload: Workload, reuses: bool) -> None:
        workload = msgspec.structs.replace(workload, reuses=reuses, has_credit=has_credit)
        _follow(report, oracle, workload)
        if reuses:
            _Gated(oracle, workload, BlockSharing.AWAITED if has_credit else BlockSharing.RUNNING).run()

    for reuses, has_chunks in ((False, False), (False, True), (True, False)):
        try:
            few(given(workload=workloads(has_chunks=has_chunks), reuses=just(reuses))(follow))()
        except Exception as error:
            kind = f"{'with' if reuses else 'without'} reuse, {'with' if has_chunks else 'without'} chunks"
            report.add(f"{kind}: {explain(error)}")
    return report


def _follow(report: Report, oracle: Oracle, workload: Workload) -> None:
    simulation, planner, fitted = Simulation(workload), Planner(workload), set[int]()
    while not simulation.is_over:
        simulation.begin()
        active, free = list(simulation.active.values()), simulation.num_free_blocks
        step, own = oracle.schedule(simulation), schedule_as_stand_in(workload, active, free)
        own = msgspec.structs.replace(own, contexts=tuple(sorted(own.contexts)))
        assert own == step, f"the stand-in schedules {own} in place of {step}"
        fresh = [each for each in step.fitting if each not in fitted]
        if not workload.chunking and (workload.has_credit or not workload.reuses):
            plan = admitted(planner.plan(active, free, simulation.prefixes))
            assert plan == fresh, f"our planner admits {plan} in place of {fresh}"
        fitted.update(fresh)
        simulation.apply(step)
        report.add(None)
    assert simulation.number < workload.max_steps, "requests do not end"

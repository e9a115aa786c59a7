"""An executor under a script of commands, on a runner whose answers depend on every token in the block tables."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
from hypothesis import strategies as st

from sluice.engine.config import EngineConfig
from sluice.engine.frames import AdapterOutcome, Cancel, Command, LoadAdapter, StepFrame, Submit, UnloadAdapter
from sluice.engine.kv_tiers.peers import BlockExchange
from sluice.engine.loop.executor import InflightExecutor
from sluice.engine.types import BlockSource, EventDetail, FinishReason, RequestFailed
from tests.engine.fake_runner import EchoRunner
from tests.engine.parts import make_request

Arrivals = list[tuple[list[int], int, int]]
"""(prompt, max_tokens, step of arrival) of each request; stream ids are its indices."""


class CommandScript:
    """A source of commands that never waits: each call returns the pending ones."""

    def __init__(self) -> None:
        self.pending: list[Command] = []

    def receive(self, timeout_s: float) -> list[Command]:
        commands, self.pending = self.pending, []
        return commands


class ScriptedExecutor:
    """An executor with its script and everything that it has emitted."""

    exchange: BlockExchange | None = None
    """Carries blocks between it and others."""

    def __init__(
        self,
        runner: EchoRunner | None = None,
        draft_runner: EchoRunner | None = None,
        **limits: object,
    ) -> None:
        self.script = CommandScript()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.reasons: dict[int, list[FinishReason]] = defaultdict(list)
        self.failures: list[RequestFailed] = []
        self.details: dict[int, EventDetail] = {}
        self.outcomes: list[AdapterOutcome] = []
        self.now = 0.0
        self.runner = runner or EchoRunner(num_blocks=24, block_size=4, max_model_len=64)
        config = msgspec.convert(
            {"model_path": "", "max_num_seqs": 6, "max_num_batched_tokens": 16, **limits}, EngineConfig
        )
        self.executor = InflightExecutor(
            self.runner, config, self.script.receive, self.record, lambda: self.now, draft_runner, self.exchange
        )

    def record(self, frame: StepFrame) -> None:
        for event in frame.events:
            assert not self.reasons[event.stream_id], "nothing comes after the end"
            self.tokens[event.stream_id] += event.token_ids
            if event.detail is not None:
                self.details.setdefault(event.stream_id, event.detail)
            if event.finish_reason is not None:
                self.reasons[event.stream_id].append(event.finish_reason)
        self.failures += frame.failures
        self.outcomes += frame.adapters

    def submit(self, stream_id: int, prompt: list[int], **fields: object) -> None:
        """Submit a request at the next step; see `make_request` for the fields."""
        self.script.pending.append(Submit(stream_id, make_request(prompt, str(stream_id), **fields)))

    def submit_from(self, source: BlockSource, stream_id: int, prompt: list[int], **fields: object) -> None:
        """Submit a request whose prompt another executor has computed."""
        request = make_request(prompt, str(stream_id), **fields)
        self.script.pending.append(Submit(stream_id, request, source=source))

    def play(
        self,
        arrivals: Arrivals,
        num_steps: int = 31,
        cancels: Sequence[tuple[int, int]] = (),
        fields: Mapping[int, Mapping[str, object]] | None = None,
    ) -> None:
        """Run `num_steps`, submit each request, with the `fields` of its stream, and cancel each stream of `cancels` at
        its step, then finish."""
        for step in range(num_steps):
            for stream_id, (prompt, max_tokens, arrival) in enumerate(arrivals):
                if arrival == step:
                    self.submit(stream_id, prompt, max_tokens=max_tokens, **(fields or {}).get(stream_id, {}))
            self.script.pending += [Cancel(stream_id) for stream_id, when in cancels if when == step]
            self.step()
        self.finish()

    def step(self) -> None:
        self.executor.step()
        self.executor.check_invariants()
        if self.executor._returns is not None:
            self.executor._returns.tiers.check()

    def step_through(self) -> None:
        """Take a step, and a second one with lookahead, where the tokens of the first come with that."""
        self.step()
        if self.runner.looks_ahead:
            self.step()

    def change_adapters(self, command: LoadAdapter | UnloadAdapter) -> AdapterOutcome:
        """Send a command and take steps until it is answered."""
        self.script.pending.append(command)
        before = len(self.outcomes)
        while len(self.outcomes) == before:
            self.step()
        return self.outcomes[-1]

    def finish(self) -> None:
        for _ in range(10_000):
            self.step()
            stats = self.executor.stats()
            if not (stats.num_running or stats.num_waiting or self.script.pending):
                return
        raise AssertionError("requests never end")


# Few first tokens and few kinds, so that many share prefixes.
prompts = st.builds(
    lambda kind, length, end: [kind] * length + end,
    st.integers(0, 2),
    st.integers(0, 30),
    st.lists(st.integers(0, 4095), min_size=1, max_size=10),
)
requests = st.lists(st.tuples(prompts, st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=20)

"""An executor on a runner whose answers depend on every token read back through the block tables."""

from collections import defaultdict

import msgspec
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.frames import Command, StepFrame, Submit
from engine.loop.executor import InflightExecutor
from engine.types import EventDetail, FinishReason, GenerateRequest, RequestFailed, SamplingParams
from tests.engine.fake_runner import EchoRunner, echo_next


class Script:
    """Commands handed out in order, one list a call; the executor is never made to wait."""

    def __init__(self) -> None:
        self.pending: list[Command] = []

    def receive(self, timeout_s: float) -> list[Command]:
        commands, self.pending = self.pending, []
        return commands


class Bench:
    """An executor with its script and everything that it said."""

    def __init__(
        self, runner: EchoRunner | None = None, draft_runner: EchoRunner | None = None, **limits: object
    ) -> None:
        self.script = Script()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.reasons: dict[int, list[FinishReason]] = defaultdict(list)
        self.failures: list[RequestFailed] = []
        self.details: dict[int, EventDetail] = {}
        self.now = 0.0
        self.runner = runner or EchoRunner(num_blocks=24, block_size=4, max_model_len=64)
        config = msgspec.convert(
            {"model_path": "", "max_num_seqs": 6, "max_num_batched_tokens": 16, **limits}, EngineConfig
        )
        self.executor = InflightExecutor(self.runner, config, self.script, self.hear, lambda: self.now, draft_runner)

    def hear(self, frame: StepFrame) -> None:
        for event in frame.events:
            assert not self.reasons[event.stream_id], "nothing comes after the end"
            self.tokens[event.stream_id] += event.token_ids
            if event.detail is not None:
                self.details.setdefault(event.stream_id, event.detail)
            if event.finish_reason is not None:
                self.reasons[event.stream_id].append(event.finish_reason)
        self.failures += frame.failures

    def submit(self, stream_id: int, prompt: list[int], **fields: object) -> None:
        """`fields` of the request and of its sampling."""
        of_request = {name: fields.pop(name) for name in GenerateRequest.__struct_fields__ if name in fields}
        params = SamplingParams(**{"temperature": 0.0, **fields})  # type: ignore[arg-type]
        request = GenerateRequest(request_id=str(stream_id), prompt_token_ids=prompt, sampling=params, **of_request)  # type: ignore[arg-type]
        self.script.pending.append(Submit(stream_id, request))

    def step(self) -> None:
        self.executor.step()
        self.executor.check_invariants()

    def finish(self) -> None:
        for _ in range(10_000):
            self.step()
            stats = self.executor.stats()
            if not (stats.num_running or stats.num_waiting or self.script.pending):
                return
        raise AssertionError("requests never end")


def echo(prompt: list[int], count: int, vocab_size: int = 4096) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(echo_next(tokens, vocab_size))
    return tokens[len(prompt) :]


# Few first tokens and few kinds, so that many share prefixes.
prompts = st.builds(
    lambda kind, length, end: [kind] * length + end,
    st.integers(0, 2),
    st.integers(0, 30),
    st.lists(st.integers(0, 4095), min_size=1, max_size=10),
)
requests = st.lists(st.tuples(prompts, st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=20)

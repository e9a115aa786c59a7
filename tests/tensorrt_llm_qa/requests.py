"""Requests through NVIDIA's own SamplingParams, and a whole runtime over NVIDIA's own executor and results."""

import asyncio
import inspect
import json
import math
import random
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sluice.engine.config import EngineConfig
from sluice.engine.delegated.interface import EngineLost
from sluice.engine.delegated.tensorrt_llm.llm import TensorRtLlm
from sluice.engine.delegated.tensorrt_llm.responses import classify
from sluice.engine.delegated.tensorrt_llm.samplers import ModelSampler, SamplerKind
from sluice.engine.delegated.tensorrt_llm.sampling import sampling_params
from sluice.engine.sampling_fields import SAMPLING_FIELDS, FieldKind
from sluice.engine.types import FinishReason, GenerateRequest, Grammar, GrammarKind, SamplingParams
from sluice.engine.validation import check_sampling
from sluice.errors import ErrorCode, SluiceError
from tests.tensorrt_llm_qa import bindings
from tests.tensorrt_llm_qa.configuration import Surroundings
from tests.tensorrt_llm_qa.loading import Checkout, Report, explain, load

NUM_REQUESTS, NUM_ANSWERS = 3000, 400
VOCAB_SIZE = 23
"""So small that ends and stop tokens come often."""
NUM_BLOCKS = 4321
_PATIENCE_S = 60.0
_BIG = 1000


def requests_are_taken(_: Checkout, work: Path, options: Any) -> Report:
    """Put random requests to the real SamplingParams, and to what NVIDIA makes of it for its C++ library."""
    report, around, chosen = Report(), Surroundings(work), random.Random(1)
    bindings.agree(load("bindings.executor").SamplingConfig, around.library.llmapi.SamplingParams)
    sampler = ModelSampler(SamplerKind.TORCH, around.library.version, max_beam_width=4)
    for number in range(round(NUM_REQUESTS * options.share)):
        try:
            params = _random_params(chosen)
            request = GenerateRequest(request_id=f"r{number}", prompt_token_ids=[1, 3], sampling=params)
            given = sampling_params(around.library, request, around.folder, "xgrammar", sampler)
        except SluiceError as error:
            if "refuses the sampling parameters" in error.message:
                report.add(error.message)
            continue
        try:
            given._get_sampling_config()
            takes = inspect.signature(given._get_output_config).parameters
            given._get_output_config(**({"is_pytorch_backend": True} if "is_pytorch_backend" in takes else {}))
            given._get_guided_decoding_params()
            report.add(None)
        except Exception as error:
            report.add(explain(error))
    return report


def _random_params(chosen: random.Random) -> SamplingParams:
    """Raises SluiceError for what no client could ask for."""
    fields = {name: _random_value(chosen, field) for name, field in SAMPLING_FIELDS.items() if chosen.random() < 0.2}
    fields |= {"max_tokens": chosen.randint(10, 50), "min_tokens": chosen.randint(0, 9), "typical_p": 1.0}
    fields["beam_width"] = chosen.choice((1, 1, 1, 4))
    fields["bad_words"] = ((chosen.randrange(9),),) if chosen.random() < 0.2 else ()
    if chosen.random() < 0.1:
        fields |= {"grammar": Grammar(GrammarKind.REGEX, "[a-z]*"), "ignore_eos": False}
    params = SamplingParams(**fields)
    check_sampling(params)
    return params


def _random_value(chosen: random.Random, field: Any) -> Any:
    low, high = (max(field.allowed.low, -_BIG), min(field.allowed.high, _BIG)) if field.allowed else (0, 9)
    number = chosen.choice((low, high, chosen.uniform(low, high)))
    match field.kind:
        case FieldKind.FLOAT:
            return float(number)
        case FieldKind.TOKEN_IDS:
            return tuple(chosen.sample(range(20), 3))
        case FieldKind.TOKEN_BIASES:
            return {chosen.randrange(20): number}
    return bool(number) if field.kind is FieldKind.BOOLEAN else round(number)


# -- a whole runtime


def runtime_answers(checkout: Checkout, work: Path, options: Any) -> Report:
    """Run the adapter over NVIDIA's executor and results, with a thread in place of its engine."""
    report, around = Report(), Surroundings(work, VOCAB_SIZE)
    try:
        asyncio.run(asyncio.wait_for(_run(report, around, round(NUM_ANSWERS * options.share)), _PATIENCE_S))
    except Exception as error:
        report.add(explain(error))
    proxy = (checkout.package / "executor" / "proxy.py").read_text(encoding="utf-8")
    lost = "executor/proxy.py has no mpi_futures any more, by which a dead worker is known"
    report.add(None if "mpi_futures" in proxy else lost)
    return report


async def _run(report: Report, around: Surroundings, count: int) -> None:
    executor, chosen, ends = _make_executor(), random.Random(2), around.folder.eos_token_ids
    runtime = TensorRtLlm(Llm(executor), around.plan({}), around.library, around.folder, EngineConfig(model_path=""))
    info, iteration = await runtime.start()
    is_told = iteration is not None and iteration.iteration > 0 and info.num_blocks == NUM_BLOCKS
    report.add(None if is_told else f"statistics: the first iteration is read as {iteration}")
    for failure in await asyncio.gather(*(_answered(runtime, chosen, ends) for _ in range(count))):
        report.add(failure)
    for number in range(10):
        reason = (await _read(runtime, SamplingParams(max_tokens=10**6, ignore_eos=True), abort_at=number))[1]
        report.add(None if reason is FinishReason.CANCELLED else f"an abort ended with {reason}")
    executor.refusal = "min_p is not supported with one-model speculative decoding."
    try:
        await _read(runtime, SamplingParams(max_tokens=1))
        report.add("a refusal did not raise")
    except Exception as error:
        taken = classify(error, at_submit=False)
        is_right = taken.is_response and not taken.is_fatal and taken.error.code is ErrorCode.INVALID
        report.add(None if is_right else f"a refusal is taken for {taken}")
    executor.mpi_futures[0].set_exception(RuntimeError("rank 0 has died"))
    report.add("a dead worker: the runtime says that it is healthy" if await runtime.is_healthy() else None)
    try:
        await _read(runtime, SamplingParams(max_tokens=1))
        report.add("a dead worker: a request is taken")
    except EngineLost:
        report.add(None)
    executor.shutdown()


async def _read(
    runtime: TensorRtLlm, params: SamplingParams, prompt: tuple[int, ...] = (3,), abort_at: int | None = None
) -> tuple[list[int], FinishReason | None, int]:
    """Return the tokens of an answer, why it ended, and the number of log probabilities."""
    asked = GenerateRequest(request_id="r", prompt_token_ids=[*prompt], sampling=params)
    handle = runtime.submit(runtime.prepare(asked))
    token_ids, reason, num_logprobs, count = [], None, 0, 0
    async for response in handle:
        delta = handle.read(response)
        token_ids += delta.token_ids
        reason = delta.finish_reason or reason
        num_logprobs += len((delta.detail and delta.detail.logprobs) or ())
        if count == abort_at:
            handle.abort()
        count += 1
    return token_ids, reason, num_logprobs


async def _answered(runtime: TensorRtLlm, chosen: random.Random, ends: tuple[int, ...]) -> str | None:
    """Ask for something random. By our own words nothing ends before min_tokens, and an end is an end."""
    params = SamplingParams(
        max_tokens=(most := chosen.randint(1, 12)),
        min_tokens=chosen.choice((0, 0, chosen.randint(0, most))),
        ignore_eos=chosen.random() < 0.2,
        stop_token_ids=tuple(chosen.sample(range(VOCAB_SIZE), chosen.choice((0, 0, 2)))),
        logprobs=chosen.choice((None, 0, 2)),
    )
    prompt = tuple(chosen.randrange(VOCAB_SIZE) for _ in range(chosen.randint(1, 6)))
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else ends)}
    expected: list[int] = []
    while len(expected) < most and not (expected and expected[-1] in stops):
        expected.append(_choose([*prompt, *expected], stops if len(expected) < params.min_tokens else set()))
    reason = FinishReason.STOP if expected[-1] in stops else FinishReason.LENGTH
    try:
        told = await _read(runtime, params, prompt)
    except Exception as error:
        return explain(error)
    is_right = told == (expected, reason, 0 if params.logprobs is None else len(expected))
    return None if is_right else f"{params}: {told} in place of {expected} {reason}"


def _choose(context: list[int], banned: set[int]) -> int:
    token = sum((place + 3) * (each + 7) for place, each in enumerate(context)) * 2654435761 % 2**32 % VOCAB_SIZE
    while token in banned:
        token = (token + 1) % VOCAB_SIZE
    return token


class Llm:
    """The LLM class as the adapter uses it, without the loading of a model."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.shutdown = executor.shutdown
        self.get_stats_async = executor.aget_stats

    def generate_async(
        self, inputs: list[int], sampling_params: Any, streaming: bool = False, cache_salt: str | None = None
    ) -> Any:
        return self._executor.generate_async(inputs, sampling_params=sampling_params, streaming=streaming)


def _make_executor() -> Any:
    """Return an executor with NVIDIA's front and our engine: a thread that makes one token of each request a step."""
    base, result = load("executor.executor").GenerationExecutor, load("executor.result")
    error_response, reasons = load("executor.utils").ErrorResponse, bindings.FinishReason

    class Executor(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__(is_llm_executor=True)
            self.refusal = ""
            self.mpi_futures: list[Future[None]] = [Future()]
            self._active: dict[int, Any] = {}
            self._aborted: set[int] = set()
            self._is_over = threading.Event()
            threading.Thread(target=self._work, daemon=True).start()

        def submit(self, request: Any) -> Any:
            request.set_id(self._get_next_client_id())
            logprobs = self._get_logprob_params(request)
            handler = self._handle_background_error
            made = result.GenerationResult(request, handler, executor=self, logprob_params=logprobs)
            if self.refusal:
                made.queue.put(error_response(request.id, self.refusal, request.id))
            else:
                state = SimpleNamespace(request=request, result=made, tokens=[], logprobs=[])
                self._active = {**self._active, request.id: state}
            return made

        def abort_request(self, request_id: int) -> None:
            self._aborted.add(request_id)

        def shutdown(self) -> None:
            self._is_over.set()

        def _work(self) -> None:
            iteration = 0
            while not self._is_over.wait(0.0005):
                for state in (active := self._active).values():
                    self._step(state)
                if active:
                    iteration += 1
                    cache = {"maxNumBlocks": NUM_BLOCKS, "freeNumBlocks": NUM_BLOCKS, "tokensPerBlock": 32}
                    told = {"iter": iteration, "iterLatencyMS": 1.0, "kvCacheStats": cache}
                    self._iter_stats_result.queue.put(json.dumps(told))
                done = {key for key, state in active.items() if state.result is None}
                self._active = {key: state for key, state in self._active.items() if key not in done}

        def _step(self, state: Any) -> None:
            request, params, tokens = state.request, state.request.sampling_params, []
            reason = reasons.CANCELLED
            if request.id not in self._aborted:
                bias = params.embedding_bias
                banned = set() if bias is None else {i for i, each in enumerate(bias.tolist()) if each == -math.inf}
                if len(state.tokens) < (params.min_tokens or 0):
                    banned.add(params.end_id)
                tokens = [_choose([*request.prompt_token_ids, *state.tokens], banned)]
                reason = self._end(params, tokens, len(state.tokens) + 1)
            state.tokens += tokens
            state.logprobs += [{token: result.Logprob(-0.5, 1)} for token in tokens]
            told = bindings.Result(
                is_final=reason is not reasons.NOT_FINISHED,
                output_token_ids=[tokens],
                finish_reasons=[reason],
                log_probs=None if params.logprobs is None else [[*state.logprobs]],
                decoding_iter=len(state.tokens),
            )
            state.result.queue.put(bindings.Response(request.id, told))
            state.result = None if told.is_final else state.result

        def _end(self, params: Any, tokens: list[int], count: int) -> Any:
            """As TorchSampler has it, which looks for stop words after it has counted."""
            if tokens[0] == params.end_id:
                return reasons.END_ID
            if count >= params.max_tokens:
                return reasons.LENGTH
            return reasons.STOP_WORDS if tokens in params._get_stop_words() else reasons.NOT_FINISHED

    return Executor()

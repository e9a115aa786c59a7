# ruff: noqa: TID252 - importers know the package as tensorrt_llm, the type checker by its folder
"""The LLM classes."""

import inspect
import itertools
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

from .._stand_in.configurations import CONFIGURATIONS
from .._stand_in.encoder import Encoder, EncoderOutput
from .._stand_in.inputs import (
    PreprocessedInputs,
    check_types,
    open_images,
    preprocess,
    record_arguments,
    record_request,
)
from .._stand_in.limits import load_as_told, make_kv_cache, max_seq_len, read_model_folder, worker_limits
from .._stand_in.lora import LoopError, LoraManager
from .._stand_in.responses import Response
from .._stand_in.samplers import Sampler, is_since
from .._stand_in.settings import settings
from .._stand_in.sleeping import SleepState
from .._stand_in.specifications import declared
from .._stand_in.tokens import Model, Script
from .._stand_in.transceiver import make_transceiver
from .._stand_in.work import Order, Work, shows_end_token
from .._stand_in.worker import Front, Ranks, Worker
from ..executor.request import LoRARequest
from ..executor.result import GenerationResult, IterationResult
from ..inputs.registry import create_input_processor
from ..sampling_params import SamplingParams
from .tokenizer import TokenizerBase, load_tokenizer


@declared("request_output")
class RequestOutput(GenerationResult):
    """A request under way, with its text."""

    def __init__(self) -> None:
        raise RuntimeError("RequestOutput is made by generate_async, not by its users.")

    @classmethod
    def _of(cls, request: Any, executor: Any, prompt: str | None, tokenizer: TokenizerBase | None) -> "RequestOutput":
        made = cls.__new__(cls)
        GenerationResult.__init__(made, request, executor)
        made._prompt = prompt
        made._tokenizer = tokenizer
        return made

    _prompt: str | None
    _tokenizer: TokenizerBase | None

    @property
    def prompt(self) -> str | None:
        return self._prompt

    @property
    def mm_embedding_handle(self) -> dict[str, Any] | None:
        return None

    def _detokenize(self) -> None:
        params = self._sampling_params
        if self._tokenizer is None or not params.detokenize:
            return
        for output in self.outputs:
            output._last_text_len = len(output.text)
            output.text = self._tokenizer.decode(output.token_ids or [], skip_special_tokens=params.skip_special_tokens)


class _Base:
    """The behaviour of both LLM classes."""

    _ARGUMENTS: str
    _IS_ENGINE: bool

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.args: Any = CONFIGURATIONS[self._ARGUMENTS](
            model=model,
            tokenizer=tokenizer,
            tokenizer_mode=tokenizer_mode,
            skip_tokenizer_init=skip_tokenizer_init,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            **kwargs,
        )
        record_arguments(self.args)
        load_as_told()
        self._folder = read_model_folder(Path(model), is_engine=self._IS_ENGINE)
        self._tokenizer = None if skip_tokenizer_init else load_tokenizer(tokenizer, self._folder.path)
        self.input_processor = create_input_processor(self._folder.path, self._tokenizer)
        self._llm_id = f"stand-in-{uuid.uuid4().hex[:8]}"
        self._ids = itertools.count(1)
        self._limits = worker_limits(self.args, self._folder, is_engine=self._IS_ENGINE)
        self._max_seq_len = max_seq_len(self.args, self._folder)
        self._sampler = Sampler(self.args, is_engine=self._IS_ENGINE)
        script = settings().script
        self._model = Model(self._folder.vocab_size, None if script is None else Script(script))
        world_size = self.args.tensor_parallel_size * self.args.pipeline_parallel_size
        kv_cache = make_kv_cache(self.args, self._limits, self._max_seq_len)
        self._has_transceiver = (transceiver := make_transceiver(self.args)) is not None
        self._worker: Worker | None = Worker(self._limits, Ranks(world_size), kv_cache, transceiver)
        self._lora, self._sleep = LoraManager(self.args), SleepState(self.args)
        self._stats: IterationResult | None = None
        self._events: IterationResult | None = None
        is_encoder = getattr(self.args, "encode_only", None) is True
        self._encoder = Encoder(self.args, self._folder, self._max_seq_len) if is_encoder else None

    @property
    def tokenizer(self) -> TokenizerBase | None:
        tokenizer: TokenizerBase | None = self.input_processor.tokenizer
        return tokenizer

    @property
    def llm_id(self) -> str:
        return self._llm_id

    def generate(
        self,
        inputs: Any,
        sampling_params: Any = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: Any = None,
    ) -> Any:
        is_one = not isinstance(inputs, list) or (bool(inputs) and isinstance(inputs[0], int))
        prompts = [inputs] if is_one else inputs
        results = [
            self.generate_async(
                prompt,
                _at(sampling_params, i),
                lora_request=_at(lora_request, i),
                cache_salt=_at(cache_salt, i),
                disaggregated_params=_at(disaggregated_params, i),
            )
            for i, prompt in enumerate(prompts)
        ]
        for result in results:
            result.result()
        return results[0] if is_one else results

    def generate_async(
        self,
        inputs: Any,
        sampling_params: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        trace_headers: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        conversation_params: Any = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        self._refuse_encode_only("generate_async")
        if not 0 <= priority <= 1:
            raise ValueError(f"priority must be a float in [0.0, 1.0], got {priority}")
        worker = self._running()
        params = self._prepared(sampling_params)
        if disaggregated_params is not None and disaggregated_params.request_type == "context_only":
            params.max_tokens = 1
        prompt = None
        if not isinstance(inputs, PreprocessedInputs):
            prompt, inputs = preprocess(self.input_processor, inputs, params)
        self._check(inputs.prompt_token_ids, params, lora_request)
        order = self._order(inputs, params, streaming, lora_request, cache_salt)
        order.disaggregated_params = disaggregated_params
        order.priority, order.conversation = priority, conversation_params and conversation_params.conversation_id
        result = RequestOutput._of(order, worker, prompt, self._tokenizer)
        self._watch(worker)
        record_request(order, lora_request)
        refusal = self._refusal(order) or self._lora_refusal(lora_request, worker)
        if refusal is not None:
            result._queue.put(Response(error=refusal))
            return result
        interval = getattr(self.args, "stream_interval", 1)
        order.sampling_params = self._sampler.effective(order.sampling_params)
        work = Work(
            order,
            self._model,
            interval,
            has_end_token=shows_end_token(is_engine=self._IS_ENGINE),
            has_one_logprob=self._sampler.has_one_logprob,
        )
        worker.submit(work, result._queue.put)
        return result

    def _collective_rpc(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        target_ranks: int | list[int] | None = None,
    ) -> list[Any]:
        self._sleep.obey(self._running(), method, *args)
        return [None]

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return _drain(self._told(self._stats, timeout))

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult:
        self._refuse_encode_only("get_stats_async")
        if settings().fault("stats_raise") is not None:
            raise RuntimeError("the statistics queue is broken")
        return self._told(self._stats, timeout)

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return _drain(self._told(self._events, timeout))

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult:
        self._refuse_encode_only("get_kv_cache_events_async")
        return self._told(self._events, timeout)

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _refuse_encode_only(self, name: str) -> None:
        if self._encoder is not None:
            raise RuntimeError(f"{name}() is not available when encode_only=True.")

    def _running(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("LLM is shutting down")
        if not self._worker.error_queue.empty():
            error = self._worker.error_queue.get()
            self.shutdown()  # on the caller's thread, which may be the event loop's
            raise error
        if self._worker.failure is not None:
            raise RuntimeError(f"The executor has failed: {self._worker.failure}")
        return self._worker

    @property
    def _executor(self) -> Any:
        """The front of the workers, as far as it can be seen; None after the end."""
        return None if self._worker is None else Front(self._worker)

    def _prepared(self, params: Any) -> Any:
        """Sampling parameters with an end. Raises ValueError without one, TypeError for a wrong type."""
        if params is None:
            params = SamplingParams()
        if not isinstance(params, SamplingParams):
            raise TypeError(f"The sampling_params must be type SamplingParams or None, but got {type(params)}")
        check_types(params)
        if self._tokenizer is not None:
            params._setup(self._tokenizer)
        elif params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None, or you can explicitly specify it")
        elif params.stop or params.bad:
            raise ValueError("tokenizer is required for stop and bad words")
        return params

    def _check(self, token_ids: list[int], params: Any, lora_request: Any) -> None:
        """Check what can be known before the request is sent. Raises ValueError."""
        limits = self._limits.batch
        if not token_ids:
            raise ValueError("The prompt must have at least one token")
        if params.n > limits.max_batch_size:
            raise ValueError(f"SamplingParams.n ({params.n}) must not exceed max_batch_size ({limits.max_batch_size})")
        width = self.args.max_beam_width or 1
        if params.use_beam_search and params.best_of > width:
            raise ValueError(f"best_of ({params.best_of}) must not exceed max_beam_width ({width}) in a beam search")
        if not self.args.enable_chunked_prefill and len(token_ids) > limits.max_num_tokens:
            raise ValueError(
                f"The prompt length ({len(token_ids)}) must not exceed max_num_tokens ({limits.max_num_tokens})"
            )
        if self._IS_ENGINE and len(token_ids) + params.max_tokens > self._max_seq_len:
            raise ValueError(
                f"The sum of prompt length ({len(token_ids)}) and max_tokens ({params.max_tokens}) must not exceed "
                f"max_seq_len ({self._max_seq_len})"
            )
        if lora_request is not None and not isinstance(lora_request, LoRARequest):
            raise TypeError(f"lora_request must be a LoRARequest, but got {type(lora_request)}")

    def _order(self, inputs: PreprocessedInputs, params: Any, streaming: bool, lora: Any, salt: str | None) -> Order:
        token_ids = inputs.prompt_token_ids
        images, are_hashed = open_images(inputs.multimodal_params)
        room = self._max_seq_len - len(token_ids)
        return Order(
            request_id=next(self._ids),
            prompt_token_ids=list(token_ids),
            sampling_params=params,
            streaming=streaming,
            end_id=None if params.ignore_eos else params.end_id,
            max_tokens=min(params.max_tokens, room),
            adapter=0 if lora is None else lora.adapter_id,
            salt=salt or "",
            images=images,
            are_images_hashed=are_hashed,
        )

    def _refusal(self, order: Order) -> str | None:
        """Return why the worker refuses it: the response says so, not the call."""
        if order.max_tokens <= 0:
            return (
                f"The prompt ({len(order.prompt_token_ids)} tokens) leaves nothing of max_seq_len {self._max_seq_len}"
            )
        if (order.is_part("context_only") or order.is_part("generation_only")) and not self._has_transceiver:
            return (
                "kv_cache_transceiver is disabled, please set 'cache_transceiver_config: backend:<backend_type>` in "
                "config file for disaggregated serving"
            )
        if self._sleep.parked:
            return "requests are not admitted while memory is released"
        if order.adapter and not self._lora.is_enabled:
            return "LoRA is not enabled"
        if order.sampling_params.guided_decoding is not None and not self.args.guided_decoding_backend:
            return "Guided decoding is not enabled"
        if order.sampling_params.top_p == 0:
            return "top_p must be greater than 0"
        if (refusal := self._sampler.refusal(order.sampling_params)) is not None:
            return refusal
        token = settings().fault("error_on_token")
        if token is not None and int(token) in order.prompt_token_ids:
            return f"a fault was asked for: token {token} is in the prompt"
        return None

    def _lora_refusal(self, request: LoRARequest | None, worker: Worker) -> str | None:
        """Read an adapter. A failure ends the worker of 1.2, and one in the loop that of every version."""
        try:
            if request is not None:
                self._lora.load(request)
        except Exception as error:
            if isinstance(error, LoopError) or settings().version == "1.2.1":
                worker.fail(str(error))
            return f"Failed to load LoRA adapter: {error}"
        return None

    def _watch(self, worker: Worker) -> None:
        """Statistics and events are there from the first request on."""
        if self._stats is None or self._events is None:
            self._stats, self._events = IterationResult(), IterationResult()
            worker.tell_stats, worker.tell_event = self._stats._queue.put, self._events._queue.put
        self._stats.mark_undone()
        self._events.mark_undone()

    def _told(self, result: IterationResult | None, timeout: float | None) -> IterationResult:
        if result is None:
            return cast(IterationResult, _Nothing())
        result.set_timeout(timeout)
        return result


class _Nothing:
    """Statistics before the first request."""

    def get_results(self) -> list[dict[str, Any]]:
        return []

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self._none()

    async def _none(self) -> AsyncIterator[dict[str, Any]]:
        return
        yield {}


def _drain(result: IterationResult) -> list[dict[str, Any]]:
    if settings().fault("stats_raise") is not None:
        raise RuntimeError("the statistics queue is broken")
    return result.get_results()


def _at(values: Any, index: int) -> Any:
    return values[index] if isinstance(values, Sequence) and not isinstance(values, str) else values


@declared("llm")
class LLM(_Base):
    """The class for PyTorch."""

    _ARGUMENTS = "TorchLlmArgs"
    _IS_ENGINE = False


if not is_since("1.3.0"):
    _known = inspect.signature(LLM.generate_async)
    _told = [each for name, each in _known.parameters.items() if name not in ("priority", "conversation_params")]
    LLM.generate_async.__signature__ = _known.replace(parameters=_told)  # type: ignore[attr-defined]


if settings().has("_check_health"):

    def _check_health(self: Any) -> bool:
        """Whether the executor lives."""
        worker = self._worker
        return worker is not None and worker.failure is None and settings().fault("unhealthy") is None

    LLM._check_health = _check_health  # type: ignore[attr-defined]


if is_since("1.3.0"):  # candidates came without it, and the first with it is not known

    def _preprocess(
        self: Any, inputs: Any, sampling_params: Any = None, disaggregated_params: Any = None
    ) -> PreprocessedInputs:
        return preprocess(self.input_processor, inputs, self._prepared(sampling_params))[1]

    LLM.preprocess = _preprocess  # type: ignore[attr-defined]

if "encode_only" in CONFIGURATIONS["TorchLlmArgs"].model_fields:

    def _encode(
        self: Any,
        inputs: Any,
        add_special_tokens: bool = True,
        batch_indexed_model_output: bool = True,
        copy_logits_to_host: bool = True,
        return_raw_logits: bool = False,
        **model_kwargs: Any,
    ) -> EncoderOutput | list[EncoderOutput]:
        """Encode a batch of token ids; the other forms of output are not made."""
        if self._encoder is None:
            raise RuntimeError("encode() requires encode_only=True. Set encode_only=True in the LLM() constructor.")
        return self._encoder.encode(inputs, model_kwargs)  # type: ignore[no-any-return]

    LLM.encode = _encode  # type: ignore[attr-defined]


class EngineLLM(_Base):
    """The class for compiled engines and for what is to be compiled."""

    _ARGUMENTS = "TrtLlmArgs"
    _IS_ENGINE = True

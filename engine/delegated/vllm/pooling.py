"""Vectors and scores of vLLM in place of tokens: one output for a prompt."""

from collections.abc import Collection
from typing import Any

from sluice.engine.config import Task
from sluice.engine.delegated.interface import ResponseDelta, internal_error
from sluice.engine.delegated.vllm.library import VllmLibrary
from sluice.engine.delegated.vllm.responses import VllmRequestHandle
from sluice.engine.types import EventDetail, FinishReason, GenerateRequest
from sluice.errors import ErrorCode, SluiceError

_TASKS = {Task.EMBED: "embed", Task.SCORE: "classify"}
"""vLLM's names of what a model is served for."""
_NO_TOKEN = 0
"""Stands for the token that a request is answered with elsewhere; it means nothing."""


def pooling_params(library: VllmLibrary, request: GenerateRequest, task: Task, num_token_types: int) -> Any:
    """Return `vllm.PoolingParams` for a request. Vectors come as they are: the gateway scales and cuts those of all
    runtimes. Scores come as the checkpoint's own activation makes them. A model without token types would not know
    what to do with them."""
    given: dict[str, Any] = {"task": _TASKS[task]}
    if task is Task.EMBED:
        given["use_activation"] = False
    if request.second_text_start and num_token_types > 1:
        given["extra_kwargs"] = {"compressed_token_type_ids": request.second_text_start}
    return library.find("vllm.pooling_params:PoolingParams")(**given)


class PooledRequestHandle(VllmRequestHandle):
    """A request whose one output is a vector, or a score."""

    def read(self, response: Any) -> ResponseDelta:
        """Return what the PoolingRequestOutput brings. Raises INTERNAL where that is an error."""
        self.is_finished = bool(response.finished)
        if getattr(response, "error", None) is not None:
            raise internal_error()
        values = response.outputs.data.float().numpy()
        if not values.size:  # an end by vLLM itself
            return ResponseDelta([], FinishReason.CANCELLED)
        num_cached = min(int(response.num_cached_tokens or 0), len(self._request.prompt_token_ids))
        return ResponseDelta(
            [_NO_TOKEN], FinishReason.LENGTH, EventDetail(num_cached, generation_logits=values.tobytes())
        )


def let_prompts_fit(arguments: Any) -> None:
    """Give a step of `AsyncEngineArgs` room for the longest prompt of a model that takes it in one piece: one whose
    tokens see those after them, or whose vector is made of all hidden states."""
    model = arguments.create_model_config()
    if not model.is_chunked_prefill_supported:
        arguments.max_num_batched_tokens = max(arguments.max_num_batched_tokens, model.max_model_len)


def longest_prompt(model: Any) -> int:
    """Return the most tokens of a prompt. `model` is vLLM's ModelConfig, which does not count that the positions of
    RoBERTa begin behind that of its padding."""
    config, most = model.hf_config, int(model.max_model_len)
    if "Roberta" not in model.architecture or getattr(config, "position_embedding_type", "absolute") != "absolute":
        return most
    return min(most, int(config.max_position_embeddings) - int(config.pad_token_id) - 1)


def check_task(model: Any, supported: Collection[str], task: Task) -> None:
    """Raise UNIMPLEMENTED for a started model that does not bring what `task` is about. `model` is vLLM's
    ModelConfig, `supported` are its tasks."""
    if _TASKS[task] not in supported:
        message = f"vLLM does not serve {model.model} for {task} but for {', '.join(sorted(supported)) or 'text'}"
        raise _unsupported(f"{message}; give another --task, or another checkpoint")
    if task is not Task.SCORE:
        return
    num_labels = getattr(model.hf_config, "num_labels", 0)
    if num_labels != 1:
        raise _unsupported(f"scores come from a cross-encoder with num_labels 1; {model.model} has {num_labels}")
    if not model.use_sep_token:
        reason = f"{model.model} is a language model, which reads a pair in a template of its own"
        raise _unsupported(f"scores come from encoders; {reason}")


def _unsupported(message: str) -> SluiceError:
    return SluiceError(ErrorCode.UNIMPLEMENTED, message, param="task")

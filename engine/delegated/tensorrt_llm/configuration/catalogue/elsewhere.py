"""Parameters of tensorrtllm_backend that say something only to its C++ code, or are said in another way here."""

from engine.delegated.tensorrt_llm.configuration.parsing import text
from engine.delegated.tensorrt_llm.configuration.setting import Setting


def _without_effect(why: str, *names: str) -> tuple[Setting, ...]:
    return tuple(Setting(name, "", text, "", no_effect=why) for name in names)


ELSEWHERE = (
    *_without_effect(
        "the model's folder is its version folder, or what model_path says",
        "engine_dir",
        "gpt_model_path",
        "encoder_engine_dir",
        "encoder_model_path",
    ),
    *_without_effect(
        "the LLM API is told of each request and cancel at once",
        "cancellation_check_period_ms",
        "stats_check_period_ms",
        "recv_poll_period_ms",
    ),
    *_without_effect(
        "ranks are started by the launcher (MPI) or orchestrator_type; GPUs are chosen by CUDA_VISIBLE_DEVICES",
        "gpu_device_ids",
        "participant_ids",
        "num_nodes",
        "executor_worker_path",
    ),
    *_without_effect("each request says whether its prompt is part of the answer", "exclude_input_in_output"),
    *_without_effect("the LLM API keeps all weights on the GPU", "gpu_weights_percent"),
    *_without_effect("TensorRT-LLM ignores it since 0.10", "enable_trt_overlap"),
    *_without_effect(
        "TensorRT-LLM cannot prefetch adapters; they are loaded when first asked for", "lora_prefetch_dir"
    ),
    *_without_effect("drafts are made within the engine", "speculative_decoding_fast_logits"),
    *_without_effect("the grammar's vocabulary is made of the tokenizer", "xgrammar_tokenizer_info_path"),
    *_without_effect("tensors of requests are read by this server", "FORCE_CPU_ONLY_INPUT_TENSORS"),
)

"""Who runs and how much of it: limits, SchedulerConfig, DynamicBatchConfig, batching and waiting."""

from engine.delegated.tensorrt_llm.configuration.parsing import (
    boolean,
    count,
    number,
    one_of,
    opposite,
    positive,
    share,
)
from engine.delegated.tensorrt_llm.configuration.setting import Setting

_SCHEDULER = "scheduler_config"
_DYNAMIC = "scheduler_config.dynamic_batch_config"
_ATTENTION_DP = "attention_dp_config"

POLICIES = ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH")
"""`CapacitySchedulerPolicy`; those of every supported version."""

SCHEDULING = (
    Setting(
        "max_batch_size",
        "max_batch_size",
        positive,
        "Most requests in one iteration.",
        ("max_num_seqs", "max_num_sequences"),
    ),
    Setting("max_num_tokens", "max_num_tokens", positive, "Most tokens in one iteration.", ("max_num_batched_tokens",)),
    Setting("max_seq_len", "max_seq_len", positive, "Longest prompt and output together.", ("max_model_len",)),
    Setting("max_input_len", "max_input_len", positive, "Longest prompt."),
    Setting("max_beam_width", "max_beam_width", positive, "Most beams of a request; the searches must be as wide."),
    Setting(
        "capacity_scheduler_policy",
        f"{_SCHEDULER}.capacity_scheduler_policy",
        one_of(*POLICIES),
        "Who may hold KV blocks.",
        ("batch_scheduler_policy", "scheduler_policy"),
    ),
    Setting(
        "context_chunking_policy",
        f"{_SCHEDULER}.context_chunking_policy",
        one_of("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"),
        "Who gets the tokens of an iteration where several prompts are chunked.",
    ),
    Setting(
        "waiting_queue_policy",
        f"{_SCHEDULER}.waiting_queue_policy",
        one_of("fcfs"),
        "Order of TensorRT-LLM's own queue, which is short: requests wait in front of it.",
        since="1.3",
    ),
    Setting(
        "enable_batch_size_tuning",
        f"{_DYNAMIC}.enable_batch_size_tuning",
        boolean,
        "Lower max_batch_size while requests are such that it pays.",
        engines_only=True,
    ),
    Setting(
        "enable_max_num_tokens_tuning",
        f"{_DYNAMIC}.enable_max_num_tokens_tuning",
        boolean,
        "Lower max_num_tokens likewise.",
        engines_only=True,
    ),
    Setting(
        "dynamic_batch_moving_average_window",
        f"{_DYNAMIC}.dynamic_batch_moving_average_window",
        positive,
        "Requests that both reckon with.",
        engines_only=True,
    ),
    Setting(
        "enable_chunked_prefill",
        "enable_chunked_prefill",
        boolean,
        "Prefill long prompts in pieces. Default: where max_num_tokens is less than the longest prompt.",
        ("enable_chunked_context",),
    ),
    Setting(
        "batching_type",
        "batching_type",
        one_of("INFLIGHT", "STATIC", inflight_fused_batching="INFLIGHT", inflight_batching="INFLIGHT", v1="STATIC"),
        "Whether requests join a batch that runs.",
        ("batching_strategy", "gpt_model_type"),
        engines_only=True,
    ),
    Setting(
        "disable_overlap_scheduler",
        "disable_overlap_scheduler",
        boolean,
        "Plan an iteration only when the one before has ended.",
        pytorch_only=True,
    ),
    Setting(
        "enable_overlap_scheduler",
        "disable_overlap_scheduler",
        opposite,
        "The same, said the other way round.",
        pytorch_only=True,
    ),
    Setting(
        "batch_wait_timeout_ms",
        "batch_wait_timeout_ms",
        number(0.0),
        "How long to wait for a full batch.",
        pytorch_only=True,
    ),
    Setting(
        "batch_wait_timeout_iters",
        "batch_wait_timeout_iters",
        count,
        "The same in iterations.",
        pytorch_only=True,
    ),
    Setting(
        "batch_wait_max_tokens_ratio",
        "batch_wait_max_tokens_ratio",
        share,
        "Share of max_num_tokens that ends this wait.",
        pytorch_only=True,
    ),
    Setting(
        "stream_interval",
        "stream_interval",
        positive,
        "Iterations between the responses of a stream. Raising it spares work where batches are large.",
        pytorch_only=True,
    ),
    Setting(
        "attention_dp_enable_balance",
        f"{_ATTENTION_DP}.enable_balance",
        boolean,
        "Wait so that the ranks of attention data parallelism have alike much to do.",
        pytorch_only=True,
    ),
    Setting(
        "attention_dp_timeout_iters",
        f"{_ATTENTION_DP}.timeout_iters",
        count,
        "Longest such wait, in iterations.",
        pytorch_only=True,
    ),
    Setting(
        "attention_dp_batching_wait_iters",
        f"{_ATTENTION_DP}.batching_wait_iters",
        count,
        "Iterations to wait for requests to batch.",
        pytorch_only=True,
    ),
)

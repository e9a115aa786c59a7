"""Over how many GPUs and nodes a model is spread, and what starts its ranks."""

from engine.delegated.tensorrt_llm.configuration.parsing import (
    boolean,
    json_object,
    list_of,
    none_or,
    one_of,
    positive,
    text,
)
from engine.delegated.tensorrt_llm.configuration.setting import Setting

PARALLELISM = (
    Setting("tensor_parallel_size", "tensor_parallel_size", positive, "GPUs that share each layer.", ("tp_size",)),
    Setting(
        "pipeline_parallel_size",
        "pipeline_parallel_size",
        positive,
        "Groups of GPUs that have the layers in turn.",
        ("pp_size",),
    ),
    Setting(
        "context_parallel_size", "context_parallel_size", positive, "GPUs that share a long context.", ("cp_size",)
    ),
    Setting("cp_config", "cp_config", json_object, "How they do it."),
    Setting(
        "moe_expert_parallel_size",
        "moe_expert_parallel_size",
        positive,
        "GPUs that have the experts in turn.",
        ("ep_size", "expert_parallel_size"),
    ),
    Setting("moe_tensor_parallel_size", "moe_tensor_parallel_size", positive, "GPUs that share each expert."),
    Setting(
        "moe_cluster_parallel_size",
        "moe_cluster_parallel_size",
        positive,
        "Groups of GPUs that have clusters of experts in turn.",
        ("cluster_size",),
    ),
    Setting("enable_attention_dp", "enable_attention_dp", boolean, "Each GPU has the attention of its own requests."),
    Setting(
        "enable_lm_head_tp_in_adp",
        "enable_lm_head_tp_in_adp",
        boolean,
        "GPUs share the last layer where each has its own attention.",
    ),
    Setting("pp_partition", "pp_partition", list_of(positive), "Layers of each group of a pipeline.", since="1.3"),
    Setting("gpus_per_node", "gpus_per_node", positive, "GPUs of a machine. Default: those that it shows."),
    Setting(
        "orchestrator_type",
        "orchestrator_type",
        none_or(one_of("rpc", "ray"), "mpi"),
        "What starts the ranks: mpi (default), rpc or ray.",
    ),
    Setting(
        "ray_worker_extension_cls",
        "ray_worker_extension_cls",
        text,
        "Class that Ray's workers are extended by.",
        pytorch_only=True,
    ),
    Setting(
        "allreduce_strategy",
        "allreduce_strategy",
        one_of(
            "AUTO",
            "NCCL",
            "UB",
            "MINLATENCY",
            "ONESHOT",
            "TWOSHOT",
            "LOWPRECISION",
            "MNNVL",
            "NCCL_SYMMETRIC",
        ),
        "How sums over GPUs are made.",
        pytorch_only=True,
    ),
    Setting("env_overrides", "env_overrides", json_object, "Environment variables of the workers.", since="1.3"),
)

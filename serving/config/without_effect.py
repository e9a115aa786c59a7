"""What a configuration asks of the server, and the server was not started with."""

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backend import BackendContext


def without_effect(config: ModelConfig, context: BackendContext) -> list[str]:
    """A sentence for each field that would be obeyed with another command line."""
    notes = []
    if context.rate_limiter is None and any(group.HasField("rate_limiter") for group in config.instance_group):
        notes.append("instance_group.rate_limiter has no effect without --rate-limit=execution_count")
    asked = dict.fromkeys(group.host_policy for group in config.instance_group if group.host_policy)
    notes += [
        f"host_policy '{name}' is not known to the server, which takes it as --host-policy={name},cpu-cores=…"
        for name in asked
        if name not in context.host_policies
    ]
    return notes

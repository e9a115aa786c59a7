"""The options of `sluice serve` for the copies of a model that run requests, under tritonserver's names."""

from dataclasses import dataclass

from gateway.options.option import choice, option, text_of

OFF, BY_EXECUTIONS = "off", "execution_count"


@dataclass(frozen=True, slots=True)
class InstanceOptions:
    """Instances: what the copies of models may take together, and which processors they keep to"""

    rate_limit: str = option(
        "--rate-limit",
        OFF,
        choice(BY_EXECUTIONS, OFF),
        "MODE",
        "execution_count: an instance runs when the resources of its rate_limiter are free, and who has run least "
        "comes first. off: whenever it is idle",
    )
    resources: tuple[str, ...] = option(
        "--rate-limit-resource",
        (),
        text_of("NAME:COUNT or NAME:COUNT:DEVICE, such as memory:4"),
        "NAME:COUNT[:DEVICE]",
        "how much there is of a resource, in all or on one device. Where none is given, the most that any instance "
        "asks for. May be given several times",
        is_many=True,
    )
    host_policies: tuple[str, ...] = option(
        "--host-policy",
        (),
        text_of("NAME,SETTING=VALUE, such as fast,cpu-cores=0-3"),
        "NAME,SETTING=VALUE",
        "cpu-cores=0-3,8 or numa-node=0 for the instances of groups with that host_policy; 'cpu' is for all others on "
        "the CPU, 'gpu_0' for those on that GPU. May be given several times",
        is_many=True,
        separator=";",
    )

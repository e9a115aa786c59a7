"""Options of serving a model by several engines."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.engine.fleet.membership import SCHEME
from sluice.engine.fleet.membership.fleet_url import FleetUrl
from sluice.engine.fleet.router import MIN_SPLIT_TOKENS, RouterSettings, RoutingPolicy
from sluice.engine.fleet.waking import WakeSettings
from sluice.errors import SluiceError
from sluice.gateway.options.option import OptionError, enum_member, integer, option, printable_text, seconds
from sluice.state.interface import REDIS_SCHEMES

if TYPE_CHECKING:
    from sluice.engine.fleet.membership.members import Membership


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Replicas: several engines of MODEL that are served as one"""

    num_replicas: int = option(
        "--replicas",
        1,
        integer(1, 64),
        "N",
        "engines of MODEL on this machine. Requests are spread over them, and where one is lost its streams go on in "
        "the others. On the CPU they share the cores and the memory of --kv-cache-memory or "
        "--kv-cache-memory-fraction, and each has a copy of the weights; on GPUs each has --tensor-parallel-size times "
        "--pipeline-parallel-size devices of its own. A model of a repository has as many as its instance_group says",
    )
    num_prefill_replicas: int = option(
        "--prefill-replicas",
        0,
        integer(0, 63),
        "N",
        "number of --replicas that compute long prompts for the others, which take their KV blocks and generate. "
        "Streams then do not slow down while long prompts are computed. Engines of --engines say so themselves "
        "(sluice engine --role prefill). On the runtimes openvino, torch and tensorrt_llm",
    )
    prefill_min_tokens: int = option(
        "--prefill-min-tokens",
        MIN_SPLIT_TOKENS,
        integer(1, 1 << 24),
        "TOKENS",
        "least uncached tokens of a prompt for a prefill replica. Fewer hand over more prompts, and a short one "
        "takes longer that way",
    )
    router: RoutingPolicy = option(
        "--router",
        RoutingPolicy.PREFIX,
        enum_member(RoutingPolicy),
        "POLICY",
        "choice of the replica for a request. prefix: the one that computes its prompt soonest, with what is cached "
        "there. least-loaded: where the fewest requests are. round-robin: each in turn",
    )
    session_bonus_s: float = option(
        "--session-bonus-secs",
        RouterSettings().session_bonus_s,
        seconds(0.0),
        "SECONDS",
        "with --router prefix: how much later the replica that had a session's last request may answer the next one "
        "and still get it. More keeps sessions together where the replicas' loads differ; 0 lets them not count",
    )
    session_ttl_s: float = option(
        "--session-ttl-secs",
        RouterSettings().session_ttl_s,
        seconds(1.0),
        "SECONDS",
        "how long after its last request the replica of a session is remembered, of up to 65,536 sessions",
    )
    engines: str | None = option(
        "--engines",
        None,
        printable_text("the path of a file, k8s://NAMESPACE/SERVICE or redis://HOST:PORT/DB#FLEET"),
        "FILE",
        "file of YAML or JSON that names engines of MODEL elsewhere, which are served instead of one here: each with a "
        "name, an address tcp://HOST:PORT, and its keys. It is read again when it changes. In a pod of Kubernetes "
        "k8s://NAMESPACE/SERVICE: the endpoints of that service, as they come and go. redis://HOST:PORT/DB#FLEET: the "
        "engines that register themselves there (sluice engine --register). MODEL's tokenizer is read here",
        secret=True,
    )
    engine_client_key: str | None = option(
        "--engine-client-key",
        None,
        printable_text("the path of a file"),
        "FILE",
        "with k8s:// and redis://: this gateway's secret certificate of CURVE, which the engines know (sluice engine "
        "keys)",
    )
    engine_server_key: str | None = option(
        "--engine-server-key",
        None,
        printable_text("the path of a file"),
        "FILE",
        "with k8s:// and redis://: the engines' public certificate",
    )

    scale_wait_target_s: float = option(
        "--scale-wait-target-secs",
        2.0,
        seconds(0.001),
        "SECONDS",
        "the predicted wait at which sluice_scale_pressure is 1, for whatever adds replicas by it. Less adds them "
        "sooner",
    )

    wake_timeout_s: float = option(
        "--wake-timeout-secs",
        0.0,
        seconds(0.0),
        "SECONDS",
        "with --engines: how long a request, or a stream whose engine has left, is held while the fleet has no engine, "
        "for whatever starts one by sluice_scale_pressure, which is 2 meanwhile. The server starts, and stays ready, "
        "without an engine. Then the request ends in an error (503). 0 holds none: without an engine the server is not "
        "ready",
    )
    wake_max_requests: int = option(
        "--wake-max-requests",
        256,
        integer(1),
        "COUNT",
        "how many requests are held so at a time; others get an error (429) that says when to try again",
    )

    def __post_init__(self) -> None:
        """Check options against each other. Raises OptionError."""
        if self.engines is not None and self.num_replicas > 1:
            raise OptionError("--replicas starts engines here, and --engines uses those of elsewhere; give one of them")
        if self.engines is None and self.wake_timeout_s:
            raise OptionError("--wake-timeout-secs holds requests for engines of elsewhere; give --engines too")
        if self.num_prefill_replicas and self.engines is not None:
            raise OptionError(
                "--prefill-replicas is for replicas here; an engine of --engines is started with --role prefill"
            )
        if self.num_prefill_replicas and self.num_prefill_replicas >= self.num_replicas:
            raise OptionError(
                f"--prefill-replicas must be fewer than --replicas, so that some generate, got "
                f"{self.num_prefill_replicas} of {self.num_replicas}"
            )
        keys = {"--engine-client-key": self.engine_client_key, "--engine-server-key": self.engine_server_key}
        given = [name for name, value in keys.items() if value is not None]
        if len(given) == 1:
            raise OptionError(f"{' and '.join(keys)} go together; only {given[0]} is given")
        source = self.engines or ""
        if given and not source.startswith((SCHEME, *REDIS_SCHEMES)):
            raise OptionError(f"{given[0]} is for --engines k8s://... and redis://...; a file names its keys itself")
        if source.startswith(REDIS_SCHEMES):
            try:
                FleetUrl.parse(source)
            except SluiceError as error:
                raise OptionError(f"--engines: {error.message}") from None

    def wake(self) -> WakeSettings | None:
        """Return the settings of the queue while there is no engine; None if requests are refused."""
        return WakeSettings(self.wake_timeout_s, self.wake_max_requests) if self.wake_timeout_s else None

    def routing(self) -> RouterSettings:
        """Return the settings of the choice of replicas."""
        return RouterSettings(
            policy=self.router, session_bonus_s=self.session_bonus_s, session_ttl_s=self.session_ttl_s
        )

    def membership(self) -> "Membership":
        """Make the source of `engines`, which must be given. Raises SluiceError for k8s:// outside of a pod, and for
        a URL with options that Redis does not have."""
        assert self.engines is not None
        # Reading options loads no library, so that --help and errors come at once.
        if self.engines.startswith(REDIS_SCHEMES):
            from sluice.engine.fleet.membership.redis_leases import RedisMembership

            return RedisMembership(
                FleetUrl.parse(self.engines), server_key=self.engine_server_key, client_key=self.engine_client_key
            )
        if not self.engines.startswith(SCHEME):
            from sluice.engine.fleet.membership.file import FileMembership

            return FileMembership(Path(self.engines))
        from sluice.engine.fleet.membership.kubernetes import ApiServer, KubernetesMembership

        api = ApiServer.of_pod()
        return KubernetesMembership(
            self.engines, api, server_key=self.engine_server_key, client_key=self.engine_client_key
        )

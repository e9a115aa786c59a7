"""Options of `sluice engine`, beside those of the engine itself."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from sluice.addresses import host_and_port
from sluice.engine.config import EngineRole, Listening
from sluice.engine.fleet.membership.fleet_url import FleetUrl
from sluice.errors import SluiceError
from sluice.gateway.options.option import OptionError, enum_member, integer, option, printable_text, truth

_EVERYWHERE = ("0.0.0.0", "::", "*")


def fleet_url(text: str) -> FleetUrl:
    """Parse the URL of a fleet in a Redis."""
    try:
        return FleetUrl.parse(text)
    except SluiceError:
        raise ValueError("redis://HOST:PORT/DB#FLEET") from None


def weight(text: str) -> float:
    """Parse a number of at least 0."""
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text, re.ASCII):
        raise ValueError("a number of at least 0, such as 2 or 0.5")
    return float(text)


@dataclass(frozen=True, slots=True)
class EngineServerOptions:
    """Where the engine listens"""

    endpoints: tuple[str, ...] = option(
        "--listen",
        (),
        printable_text("an endpoint tcp://HOST:PORT"),
        "ENDPOINT",
        "tcp://HOST:PORT at which gateways reach the engine, such as tcp://0.0.0.0:5557; port 0 is one that is free, "
        "and stays the same when the engine is restarted. May be given several times",
        is_many=True,
    )
    curve_key: str | None = option(
        "--curve-key",
        None,
        printable_text("a file"),
        "FILE",
        "the engine's secret certificate, NAME.key_secret of `sluice engine keys`. Connections are encrypted with it, "
        "and only --allowed-clients may connect",
    )
    allowed_clients: str | None = option(
        "--allowed-clients",
        None,
        printable_text("a folder"),
        "FOLDER",
        "folder of the gateways' public certificates (*.key). A gateway may connect from the moment its file is there; "
        "taking a file away refuses its next connection, not the one it has",
    )
    is_insecure: bool = option(
        "--insecure",
        False,
        truth,
        None,
        "listen for other machines without keys: whoever reaches the port can use the engine and read along",
        variable="SLUICE_ENGINE_INSECURE",
    )
    role: EngineRole = option(
        "--role",
        EngineRole.GENERATE,
        enum_member(EngineRole),
        "ROLE",
        "generate: serves requests. prefill: computes long prompts for the other engines of its gateways, which take "
        "its KV blocks and generate; it serves requests only while no other does. On the runtimes openvino, "
        "torch and tensorrt_llm",
        variable="SLUICE_ENGINE_ROLE",
    )
    health_port: int = option(
        "--health-port",
        0,
        integer(0, 65_535),
        "PORT",
        "port of /health/live, /health/ready and /metrics over HTTP; 0 for none",
    )
    health_host: str = option(
        "--health-host",
        "127.0.0.1",
        printable_text("an address"),
        "HOST",
        "address of that port; 0.0.0.0 lets other machines ask, which needs no key",
    )

    register: FleetUrl | None = option(
        "--register",
        None,
        fleet_url,
        "URL",
        "redis://HOST:PORT/DB#FLEET, a Redis where the engine registers itself while it runs. Gateways that were "
        "started with `--engines` and the same URL find it there. Without #FLEET the fleet is called default",
        secret=True,
    )
    advertised_host: str | None = option(
        "--advertise",
        None,
        printable_text("a host name or an address"),
        "HOST",
        "with --register: the name or address by which gateways reach this machine. Default: that of --listen",
    )
    register_name: str | None = option(
        "--register-name",
        None,
        printable_text("a name"),
        "NAME",
        "with --register: the engine's name in logs and metrics, another for each engine. Default: its HOST:PORT",
    )
    register_version: str = option(
        "--register-version",
        "",
        printable_text("a version"),
        "VERSION",
        "with --register: engines of one version share its weight beside that of other versions",
    )
    register_weight: float = option(
        "--register-weight",
        1.0,
        weight,
        "WEIGHT",
        "with --register: weight of the engine's version, relative to other versions; 0 gets no requests",
    )

    def __post_init__(self) -> None:
        """Check options against each other. Raises OptionError."""
        given = {
            "--advertise": self.advertised_host is not None,
            "--register-name": self.register_name is not None,
            "--register-version": self.register_version != "",
            "--register-weight": self.register_weight != 1.0,
        }
        flags = [flag for flag, is_given in given.items() if is_given]
        if self.register is None and flags:
            raise OptionError(f"{flags[0]} needs --register beside it")
        if self.register is None or self.advertised_host is not None or not self.endpoints:
            return
        if urlsplit(self.endpoints[0]).hostname in _EVERYWHERE:
            raise OptionError(
                f"--register needs --advertise HOST beside --listen {self.endpoints[0]}, "
                "because gateways elsewhere cannot know which machine that is"
            )

    def advertised_address(self, endpoint: str) -> str:
        """Return the address at which gateways reach the engine that listens at `endpoint`."""
        host = self.advertised_host
        if host is None:
            return endpoint
        return f"tcp://{host_and_port(host, urlsplit(endpoint).port)}"

    def listening(self) -> Listening:
        """Return the endpoints. Raises OptionError where they are missing, or their keys are."""
        if not self.endpoints:
            raise OptionError("--listen is missing: name an endpoint, such as --listen tcp://127.0.0.1:5557")
        if (self.curve_key is None) != (self.allowed_clients is None):
            there, missing = "--curve-key", "--allowed-clients"
            if self.curve_key is None:
                there, missing = missing, there
            raise OptionError(f"{there} needs {missing} beside it")
        try:
            return Listening(
                endpoints=[*self.endpoints],
                curve_key=self.curve_key,
                allowed_clients=self.allowed_clients,
                is_insecure=self.is_insecure,
            )
        except SluiceError as error:
            raise OptionError(f"--{(error.param or 'listen').replace('_', '-')}: {error.message}") from None

"""Options of `sluice engine`, beside those of the engine itself."""

from dataclasses import dataclass

from engine.config import Listening
from gateway.options.option import OptionError, integer, option, printable_text, truth
from sluice.errors import SluiceError


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

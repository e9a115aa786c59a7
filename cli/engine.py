"""The command `sluice engine`: runs one engine alone, which gateways reach over TCP, and makes keys for both."""

import logging
import sys
from dataclasses import replace
from pathlib import Path

from sluice.cli.errors import reports_errors
from sluice.cli.serve import resolve_draft_model, start_log
from sluice.engine.process.curve import make_certificates
from sluice.gateway.checkpoint import find_checkpoint, served_name
from sluice.gateway.front.listeners import ListenError
from sluice.gateway.options.command_line import add_options
from sluice.gateway.options.config import GROUPS, ParsedFlags, read_config, read_group
from sluice.gateway.options.engine_server import EngineServerOptions
from sluice.gateway.options.option import OneLineParser
from sluice.gateway.process_settings import raise_file_limit

_EPILOG = """\
Gateways on other machines then send their requests here. Every option can be set in the environment too, as SLUICE_
and its name, such as SLUICE_LISTEN.

examples:
  sluice engine keys keys --name engine-1           make the engine's keys, and a gateway's
  sluice engine keys keys --name gateway-1
  mkdir allowed && cp keys/gateway-1.key allowed/   let that gateway connect
  sluice engine /models/Qwen3-0.6B --listen tcp://0.0.0.0:5557 \\
      --curve-key keys/engine-1.key_secret --allowed-clients allowed --health-port 8080
  sluice engine --listen tcp://127.0.0.1:5557       the bundled model, for gateways of this machine
  sluice engine --listen tcp://127.0.0.1:0 --register redis://127.0.0.1:6379/0#rill
                                                    for gateways with --engines redis://127.0.0.1:6379/0#rill

A gateway needs its own secret file (gateway-1.key_secret) and the engine's public one (engine-1.key). The engine's
secret file stays with the engine.

SIGTERM: the engine takes no new requests, ends those that it has within --exit-timeout-secs, and ends. An engine that
crashes is replaced at the same endpoint, and its streams go on. Exit codes: 0 after a clean end, 1 where the engine
could not start or failed too often, 2 for a bad option.
"""
_KEYS_DESCRIPTION = """\
Make a pair of keys for an engine or a gateway: FOLDER/NAME.key, which the other side
gets, and FOLDER/NAME.key_secret, which only this user can read and which stays here.
"""
_ENGINE_GROUPS = ("model", "scheduling", "cache", "speculation", "tensorrt_llm", "shutdown", "logging")
_REQUEST_FLAGS = ("--allow-runtime-lora-updating", "--enable-sleep-mode")


@reports_errors("sluice engine", ListenError)
def command(argv: list[str]) -> int:
    """Run one engine alone, which gateways on other machines share."""
    if argv[:1] == ["keys"]:
        return _make_keys(argv[1:])
    flags = {flag: value for flag, value in vars(_parser().parse_args(argv)).items() if value is not None}
    return _run(flags)


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="sluice engine",
        usage="sluice engine [MODEL] --listen tcp://HOST:PORT [OPTIONS]\n       sluice engine keys FOLDER --name NAME",
        description="Run one engine alone, which gateways on other machines share over TCP.",
        epilog=_EPILOG,
    )
    add_options(parser, (EngineServerOptions, *(GROUPS[name] for name in _ENGINE_GROUPS)))
    add_options(parser, (GROUPS["requests"],), only=_REQUEST_FLAGS)
    return parser


def _run(flags: ParsedFlags) -> int:
    options = read_group(EngineServerOptions, flags)
    listening = options.listening()
    config = resolve_draft_model(read_config(flags))
    checkpoint = find_checkpoint(config.model.path, engine_python=config.tensorrt_llm.engine_python)
    config = replace(config, model=replace(config.model, path=str(checkpoint)))
    start_log(config.logging)
    if options.is_insecure:
        logging.getLogger(__name__).warning("--insecure: whoever reaches the port can use the engine and read along")
    from sluice.cli.engine_server import run_engine  # imported late: bad options are reported without its imports

    raise_file_limit()
    return run_engine(config, options, listening, served_name(config.model.served_model_name, checkpoint))


def _make_keys(argv: list[str]) -> int:
    parser = OneLineParser(prog="sluice engine keys", description=_KEYS_DESCRIPTION)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of the two files; it is made if needed")
    parser.add_argument("--name", required=True, help="name of the files, such as engine-1")
    arguments = parser.parse_args(argv)
    public, secret = make_certificates(arguments.folder, arguments.name)
    sys.stdout.write(f"{public}\n{secret}\n")
    return 0

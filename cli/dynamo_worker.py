"""`sluice dynamo-worker`: serves a model as a worker of NVIDIA Dynamo, under its front end and its router."""

from importlib.util import find_spec

from sluice.cli.errors import CommandError, reports_errors
from sluice.cli.serve import start_log
from sluice.gateway.checkpoint import find_checkpoint, served_name
from sluice.gateway.options.command_line import add_options
from sluice.gateway.options.config import GROUPS, ServeConfig, read_config, read_group
from sluice.gateway.options.dynamo import DynamoOptions
from sluice.gateway.options.option import OneLineParser

_GROUPS = ("model", "scheduling", "cache", "speculation", "tensorrt_llm", "shutdown", "logging")
"""Groups of the options of `sluice serve` that belong to an engine."""
_DESCRIPTION = """\
Serve a model as a worker of NVIDIA Dynamo: its front end speaks HTTP, tokenizes and routes, this engine batches and
generates. Several workers of one model share a namespace and a component.
"""
_EPILOG = """\
Dynamo's libraries are an extra, and its Python part comes without what it depends on:
  pip install 'sluice[dynamo]' && pip install --no-deps ai-dynamo==1.6.1

examples:
  sluice dynamo-worker /models/Qwen3-0.6B
  python -m dynamo.frontend --router-mode kv --discovery-backend file --request-plane tcp --event-plane zmq

Exit codes: 0 after a clean shutdown, 1 where the worker could not start, 2 for a bad option.
"""


@reports_errors("sluice dynamo-worker")
def command(argv: list[str]) -> int:
    """Serve a model as a worker of NVIDIA Dynamo, under its front end and its router."""
    config, dynamo = _parse(argv)
    if missing := _missing():
        raise CommandError(missing)
    checkpoint = find_checkpoint(config.model.path, engine_python=config.tensorrt_llm.engine_python)
    engine = config.engine(str(checkpoint))
    start_log(config.logging)
    from sluice.gateway.dynamo.worker import serve_worker

    name = served_name(config.model.served_model_name, checkpoint)
    serve_worker(engine, name, dynamo, config.shutdown.heartbeat_timeout_s)
    return 0


def _parse(argv: list[str]) -> tuple[ServeConfig, DynamoOptions]:
    """Parse the command line. Raises OptionError; exits where it cannot be understood."""
    parser = OneLineParser(
        prog="sluice dynamo-worker",
        usage="sluice dynamo-worker [MODEL] [OPTIONS]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add_options(parser, (DynamoOptions, *(GROUPS[name] for name in _GROUPS)))
    flags = {flag: value for flag, value in vars(parser.parse_args(argv)).items() if value is not None}
    return read_config(flags), read_group(DynamoOptions, flags)


def _missing() -> str:
    """Return the instruction to install Dynamo; "" if it is installed."""
    if find_spec("dynamo") is None or find_spec("dynamo._core") is None:
        return "Dynamo's runtime is not installed: pip install 'sluice[dynamo]'"
    if find_spec("dynamo.common") is None:
        return "Dynamo's Python part is not installed: pip install --no-deps ai-dynamo==1.6.1"
    return ""

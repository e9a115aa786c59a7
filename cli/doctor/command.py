"""`sluice doctor`: its command line, and the run over machine and models."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from sluice.cli.doctor.facts import MachineFacts
from sluice.cli.doctor.findings import DoctorFinding, findings_json, print_findings
from sluice.cli.doctor.live import diagnose
from sluice.cli.doctor.machine import read_machine
from sluice.cli.doctor.machine_checks import check_machine
from sluice.cli.doctor.model_checks import ServingOptions, check_model
from sluice.cli.doctor.models import ModelTarget, find_targets, read_model
from sluice.cli.errors import CommandError, reports_errors
from sluice.cli.server import find_server
from sluice.engine.config import EngineConfig, Runtime
from sluice.engine.runtimes import RuntimeChoice, choose_runtime
from sluice.errors import SluiceError
from sluice.gateway.options.command_line import add_options
from sluice.gateway.options.config import GROUPS, ServeConfig, read_config
from sluice.gateway.options.option import FAILED, USAGE_ERROR, OneLineParser, OptionError, argument_type, seconds
from sluice.gateway.options.rag import RagClientOptions
from sluice.gateway.watch.live.findings import Severity

_OVERVIEW = """\
Check this machine, its libraries and the models to be served. The report lists what will not work, what will work
badly, and what to do. Nothing is loaded, changed or downloaded.

Without a MODEL only the machine is checked: processor, memory, disk, ports, GPUs, driver, CUDA, libraries.

With --live URL a running server is watched for some seconds instead, and the report says what bounds it (its queue, the
KV cache, prefill, compute, the gateway, an instance of a model, a quota, a lost replica) and which option to turn.
"""

_EPILOG = """\
examples:
  sluice doctor                                          check this machine
  sluice doctor /models/llama-3.1-8b                     check whether this model runs here, and on which runtime
  sluice doctor /models/llama-3.1-70b --tensor-parallel-size 4 --runtime tensorrt_llm
  sluice doctor /model-repository                        check every language model of a repository
  sluice doctor --live http://127.0.0.1:8000             what bounds this running server?
  sluice doctor --live http://10.0.0.7:8000 --seconds 30 --json
  sluice doctor --json | jq '.findings[] | select(.level == "fail")'

Options of `sluice serve` may stand in its variables too, such as SLUICE_HTTP_PORT.

Memory is estimated from the size of the weights' files, two GiB of each GPU for the runtime, and the KV cache in what
is left.

Exit codes: 0 where all will work, 1 where something will not, 2 for a bad option or a MODEL that is none. With --live:
1 for a server that cannot be asked, takes no requests or has lost an engine, 0 for all else.
"""


_GROUPS = ("model", "scheduling", "cache", "tensorrt_llm", "http", "grpc", "metrics")
_FLAGS = (
    *("--runtime", "--quantization", "--cache-path", "--max-model-len", "--kv-cache-dtype", "--tensor-parallel-size"),
    *("--pipeline-parallel-size", "--engine-python", "--host", "--http-port", "--grpc-port", "--metrics-port"),
)
"""The options of `sluice serve` that a check depends on."""


@reports_errors("sluice doctor")
def command(argv: list[str]) -> int:
    """Check this machine, its libraries and models, and report what will not work and what to do."""
    arguments = _parser().parse_args(argv)
    flags = {flag: value for flag, value in vars(arguments).items() if flag.startswith("--") and value is not None}
    if arguments.live is not None:
        return _diagnose(arguments, flags)
    try:
        config = read_config(flags)
        targets = [target for path in arguments.models for target in find_targets(path, _engine_config(config))]
        findings = list(_check(config, targets))
    except SluiceError as error:
        raise CommandError(error.message, USAGE_ERROR) from None
    if arguments.json:
        sys.stdout.write(findings_json(findings).decode() + "\n")
    else:
        print_findings(findings, Console())
    return FAILED if any(finding.level is Severity.FAIL for finding in findings) else 0


def _diagnose(arguments: argparse.Namespace, flags: dict[str, str]) -> int:
    """Judge a running server."""
    if arguments.models:
        raise OptionError("--live watches a server: leave MODEL out")
    server = find_server(arguments.live, flags.get("--api-key"), arguments.metrics_url)
    return diagnose(server, arguments.seconds, is_json=arguments.json)


def _engine_config(config: ServeConfig) -> EngineConfig:
    return EngineConfig(
        model_path="",
        runtime=config.model.runtime,
        quantization=config.model.quantization,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        max_model_len=config.scheduling.max_model_len,
        **config.tensorrt_llm.engine_fields(),
    )


def _check(config: ServeConfig, targets: list[ModelTarget]) -> Iterator[DoctorFinding]:
    ports = (config.http.port, config.grpc.port, config.metrics.port)
    cache_folder = Path(config.model.cache_path or "~/.cache/sluice").expanduser()
    machine = read_machine(config.http.host, ports, cache_folder, config.tensorrt_llm.engine_python)
    yield from check_machine(machine, _required_runtime(config.model.runtime, targets))
    for target in targets:
        yield from _check_target(target, machine)


def _required_runtime(requested: Runtime, targets: list[ModelTarget]) -> Runtime:
    """Return the runtime that the machine must support: one with GPUs where a model needs it, else `requested`."""
    configs = [(target, target.config) for target in targets if not isinstance(target.config, DoctorFinding)]
    choices = [target.choice or _choose_runtime(config) for target, config in configs]
    specs = [choice.spec for choice in choices if isinstance(choice, RuntimeChoice)]
    return next((spec.runtime for spec in specs if spec.min_capability), requested)


def _check_target(target: ModelTarget, machine: MachineFacts) -> Iterator[DoctorFinding]:
    if isinstance(target.config, DoctorFinding):
        yield target.config
        return
    config = target.config
    num_gpus = config.tensor_parallel_size * config.pipeline_parallel_size
    try:
        model = read_model(target.name, Path(config.model_path), target.tokenizer, num_gpus=num_gpus)
    except SluiceError as error:
        yield DoctorFinding(Severity.FAIL, target.name, error.message)
        return
    options = ServingOptions(num_gpus, config.quantization, config.kv_cache_dtype, config.max_model_len, config.device)
    yield from check_model(model, machine, target.choice or _choose_runtime(config), options)


def _choose_runtime(config: EngineConfig) -> RuntimeChoice | SluiceError:
    try:
        return choose_runtime(config)
    except SluiceError as error:
        return error


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="sluice doctor",
        usage="sluice doctor [OPTIONS] [MODEL...]",
        description=_OVERVIEW,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="folder of a checkpoint, an IR, a compiled engine or a model repository, or ORG/NAME of the hub's cache",
    )
    parser.add_argument("--json", action="store_true", help="write one JSON object to standard output")
    live = parser.add_argument_group("a running server")
    live.add_argument("--live", metavar="URL", help="watch the server at this address, and say what bounds it")
    live.add_argument(
        "--seconds",
        type=argument_type(seconds(0.1)),
        default=5.0,
        metavar="SECONDS",
        help="how long it is watched. Default: 5",
    )
    live.add_argument("--metrics-url", metavar="URL", help="address of its metrics. Default: as the server says")
    add_options(parser, (RagClientOptions,), only=("--api-key",))
    add_options(parser, (GROUPS[name] for name in _GROUPS), only=_FLAGS)
    return parser

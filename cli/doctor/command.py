"""`sluice doctor`: what will work on this machine and what will not."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from cli.doctor.arguments import parse
from cli.doctor.facts import Machine
from cli.doctor.findings import Finding, Level
from cli.doctor.machine import read_machine
from cli.doctor.machine_checks import check_machine
from cli.doctor.model_checks import Wanted, check_model
from cli.doctor.models import read_model
from cli.doctor.report import as_json, show
from cli.doctor.targets import Target, find_targets
from engine.config import EngineConfig, Runtime
from engine.runtimes import RuntimeChoice, choose_runtime
from gateway.options.option import FAILED, USAGE_ERROR
from sluice.errors import SluiceError


def command(argv: list[str]) -> int:
    """Say what of this machine, its libraries and a model will not work, and what to do."""
    arguments = parse(argv)
    try:
        targets = [target for path in arguments.models for target in find_targets(path, _config(arguments))]
        findings = list(_findings(arguments, targets))
    except SluiceError as error:
        sys.stderr.write(f"sluice doctor: error: {error.message}\n")
        return USAGE_ERROR
    if arguments.json:
        sys.stdout.write(as_json(findings).decode() + "\n")
    else:
        show(findings, Console())
    return FAILED if any(finding.level is Level.FAIL for finding in findings) else 0


def _config(arguments: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model_path="",
        runtime=arguments.runtime,
        tensor_parallel_size=arguments.tensor_parallel_size,
        pipeline_parallel_size=arguments.pipeline_parallel_size,
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
        max_model_len=arguments.max_model_len,
        engine_python=arguments.engine_python,
    )


def _findings(arguments: argparse.Namespace, targets: list[Target]) -> Iterator[Finding]:
    ports = (arguments.http_port, arguments.grpc_port, arguments.metrics_port)
    cache_folder = Path(arguments.cache_path).expanduser()
    machine = read_machine(arguments.host, ports, cache_folder, arguments.engine_python)
    yield from check_machine(machine, _needed(arguments.runtime, targets))
    for target in targets:
        yield from _of_target(target, machine)


def _needed(asked: Runtime, targets: list[Target]) -> Runtime:
    """What the machine must have: where the command line leaves it open, a model may not."""
    configs = [(target, target.config) for target in targets if not isinstance(target.config, Finding)]
    choices = [target.choice or _choice(config) for target, config in configs]
    runtimes = {choice.runtime for choice in choices if isinstance(choice, RuntimeChoice)}
    return Runtime.TENSORRT_LLM if Runtime.TENSORRT_LLM in runtimes else asked


def _of_target(target: Target, machine: Machine) -> Iterator[Finding]:
    if isinstance(target.config, Finding):
        yield target.config
        return
    config = target.config
    num_gpus = config.tensor_parallel_size * config.pipeline_parallel_size
    try:
        model = read_model(target.name, Path(config.model_path), target.tokenizer, num_gpus=num_gpus)
    except SluiceError as error:
        yield Finding(Level.FAIL, target.name, error.message)
        return
    wanted = Wanted(num_gpus, config.quantization, config.kv_cache_dtype, config.max_model_len)
    yield from check_model(model, machine, target.choice or _choice(config), wanted)


def _choice(config: EngineConfig) -> RuntimeChoice | SluiceError:
    try:
        return choose_runtime(config)
    except SluiceError as error:
        return error

"""`sluice build`: a checkpoint becomes a model repository."""

import sys
from dataclasses import replace

from gateway.arguments import FAILED, USAGE_ERROR
from gateway.building.arguments import parse
from gateway.options import ConfigError

_ERROR = "sluice build: error: "


def command(arguments: list[str]) -> int:
    """Make a model repository of a HuggingFace or NeMo checkpoint."""
    options = parse(arguments)
    # What they import is wanted only once the options are right.
    from rich.console import Console

    from engine.errors import SluiceError
    from gateway.building.building import build, dry_run, told
    from gateway.building.failures import AskedError, BuildError
    from gateway.config import read_config

    try:
        options = replace(options, cache_path=options.cache_path or read_config({}).model.cache_path)
        if options.is_dry:
            sys.stdout.write(dry_run(options))
            return 0
        models = build(options, Console(stderr=True, soft_wrap=True))
    except (AskedError, ConfigError) as error:
        sys.stderr.write(f"{_ERROR}{error}\n")
        return USAGE_ERROR
    except (BuildError, SluiceError, OSError) as error:
        sys.stderr.write(f"{_ERROR}{error}\n")
        return FAILED
    sys.stdout.writelines(f"{line}\n" for line in (f"Built {options.output}:", *told(options, models)))
    return 0

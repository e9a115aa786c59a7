"""`sluice build`: a checkpoint becomes a model repository."""

import sys
from dataclasses import replace

from gateway.options.option import FAILED, USAGE_ERROR
from cli.build.arguments import parse
from gateway.options.option import OptionError

_ERROR = "sluice build: error: "


def command(arguments: list[str]) -> int:
    """Make a model repository of a HuggingFace or NeMo checkpoint."""
    options = parse(arguments)
    # What they import is wanted only once the options are right.
    from rich.console import Console

    from sluice.errors import SluiceError
    from cli.build.building import build, dry_run, told
    from cli.build.failures import AskedError, BuildError
    from gateway.options.config import read_config

    try:
        options = replace(options, cache_path=options.cache_path or read_config({}).model.cache_path)
        if options.is_dry:
            sys.stdout.write(dry_run(options))
            return 0
        models = build(options, Console(stderr=True, soft_wrap=True))
    except (AskedError, OptionError) as error:
        sys.stderr.write(f"{_ERROR}{error}\n")
        return USAGE_ERROR
    except (BuildError, SluiceError, OSError) as error:
        sys.stderr.write(f"{_ERROR}{error}\n")
        return FAILED
    sys.stdout.writelines(f"{line}\n" for line in (f"Built {options.output}:", *told(options, models)))
    return 0

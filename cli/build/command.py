"""`sluice build`: runs a build, or prints it as a script."""

import sys
from dataclasses import replace

from sluice.cli.build.options import parse_options
from sluice.cli.errors import reports_errors


@reports_errors("sluice build", OSError)
def command(argv: list[str]) -> int:
    """Make a model repository from a HuggingFace or NeMo checkpoint."""
    options = parse_options(argv)
    # Imported only after the options are checked, to report a bad option at once.
    from rich.console import Console

    from sluice.cli.build.building import build, make_script, summary_lines
    from sluice.gateway.options.config import read_config

    options = replace(options, cache_path=options.cache_path or read_config({}).model.cache_path)
    if options.is_dry:
        sys.stdout.write(make_script(options))
        return 0
    models = build(options, Console(stderr=True, soft_wrap=True))
    sys.stdout.writelines(f"{line}\n" for line in (f"Built {options.output}:", *summary_lines(options, models)))
    return 0

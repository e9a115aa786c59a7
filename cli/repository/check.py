"""`sluice repository check`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cli.repository.report import Style, as_json, lines
from gateway.options.option import FAILED, USAGE_ERROR, OptionError
from serving.backends.registry import BackendRegistry
from serving.repository.inspection.report import ModelReport, Verdict
from serving.repository.inspection.repositories import inspect_repositories
from serving.repository.pruning import check_roots
from serving.repository.stores.location import local_path, store_location
from serving.repository.stores.roots import make_roots
from sluice.errors import SluiceError


def check(arguments: argparse.Namespace) -> int:
    """Print the report, and return the exit code."""
    try:
        reports = _reports(arguments.paths, has_namespaces=arguments.model_namespacing)
        if arguments.load:
            from cli.repository.loading import with_loads

            reports = with_loads(reports, arguments.paths, has_namespaces=arguments.model_namespacing)
    except (SluiceError, OptionError, OSError) as error:
        sys.stderr.write(f"sluice repository check: error: {error}\n")
        return USAGE_ERROR
    if arguments.json:
        sys.stdout.write(as_json(reports).decode() + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in lines(reports, Style(sys.stdout)))
    return _exit_code(reports, is_strict=arguments.strict)


def _reports(paths: Sequence[str], *, has_namespaces: bool) -> list[ModelReport]:
    check_roots([Path(local_path(path)) for path in paths if store_location(path) is None])
    roots = make_roots(paths, None, 0.0)
    try:
        return inspect_repositories(roots, BackendRegistry(), has_namespaces=has_namespaces)
    finally:
        for root in roots:
            root.close()


def _exit_code(reports: Sequence[ModelReport], *, is_strict: bool) -> int:
    verdicts = {report.verdict for report in reports}
    failing = {Verdict.ERROR, Verdict.NOTES} if is_strict else {Verdict.ERROR}
    return FAILED if verdicts & failing else 0

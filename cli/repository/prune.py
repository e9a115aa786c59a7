"""`sluice repository prune`: deletes old versions of the models in a repository."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from sluice.cli.errors import CommandError, reports_errors
from sluice.cli.terminal import confirm, format_size
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.options.option import FAILED, USAGE_ERROR
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.repository.pruning import PrunePlan, Removal, check_roots, plan_prune, remove_version
from sluice.serving.repository.stores.location import local_path, store_location


@reports_errors("sluice repository prune")
def prune(arguments: argparse.Namespace) -> int:
    """Show the versions to delete, ask for confirmation on a terminal, delete them; return the exit code."""
    try:
        roots = _local_roots(arguments.paths)
        check_roots(roots)
    except SluiceError as error:
        raise CommandError(error.message, USAGE_ERROR) from None
    try:
        plan = plan_prune(roots, arguments.keep, BackendRegistry())
    except (SluiceError, OSError) as error:
        raise CommandError(f"{error}; nothing was deleted") from None
    sys.stdout.writelines(f"{line}\n" for line in _table_lines(plan))
    if arguments.dry_run or not (plan.removals or plan.leftovers):
        return 0
    if not arguments.yes:
        confirm("delete them?", "--yes deletes without, --dry-run only shows", "nothing was deleted")
    return _delete(plan)


def _local_roots(paths: list[str]) -> list[Path]:
    remote = next((path for path in paths if store_location(path) is not None), None)
    if remote is not None:
        raise SluiceError(ErrorCode.INVALID, f"{remote} is no folder of this machine: prune deletes only in those")
    return [Path(local_path(path)) for path in paths]


def _table_lines(plan: PrunePlan) -> Iterator[str]:
    removals = (*plan.removals, *plan.leftovers)
    if removals:
        width = max(len("model"), *(len(each.model) for each in removals))
        yield f"{'model':<{width}}  {'version':>7}  {'size':>9}"
        for each in removals:
            yield f"{each.model:<{width}}  {each.version:>7}  {format_size(each.size_bytes):>9}  {each.note}".rstrip()
        yield ""
    for kept in plan.kept:
        yield f"stays: {kept.model} version {kept.version}, {kept.reason}"
    number = f"{len(removals)} version{'' if len(removals) == 1 else 's'}"
    yield f"{number}, {format_size(plan.size_bytes)}" if removals else "nothing to delete"


def _delete(plan: PrunePlan) -> int:
    failed = [each for each in (*plan.removals, *plan.leftovers) if not _is_deleted(each)]
    freed = plan.size_bytes - sum(each.size_bytes for each in failed)
    sys.stdout.write(f"deleted, {format_size(freed)} freed\n")
    return FAILED if failed else 0


def _is_deleted(removal: Removal) -> bool:
    try:
        remove_version(removal)
    except OSError as error:
        sys.stderr.write(f"sluice repository prune: error: {removal.folder} cannot be deleted: {error}\n")
        return False
    return True

"""Options of routes: names that stand for several models."""

from dataclasses import dataclass

from sluice.gateway.options.option import option, printable_text


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """Routes: names that stand for several models, of which the first that can answers"""

    file: str | None = option(
        "--routes",
        None,
        printable_text("the path of a file"),
        "FILE",
        "routes, in YAML or JSON: {routes: {NAME: {targets: [{model: NAME}, ...]}}} (docs/routes.md)",
    )

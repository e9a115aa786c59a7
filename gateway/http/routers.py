"""Routers of parts become one."""

from fastapi import APIRouter


def add_routes(router: APIRouter, *parts: APIRouter) -> None:
    """Add the routes of all parts, with the prefixes, tags and defaults of their own routers.

    FastAPI's `include_router` has more to offer and costs more: it makes each route anew at the first request, and asks
    one router after the other for every request.
    """
    for part in parts:
        router.routes.extend(part.routes)

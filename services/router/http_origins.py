"""Which web pages may use an HTTP port that needs no API key: those of this machine, and of
the origins in the setting `cors_origins`.

Such a port is open to this machine only, and so to every page that a browser on it shows: a page
from elsewhere whose name was made to point at 127.0.0.1 (DNS rebinding) is of one origin with the
port, as the browser sees it. A browser says in `Origin` from which page a POST comes; other clients
send none. One asyncio loop.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from process.errors import PermissionDenied
from services.router.http_server import Handler

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def add_to(app: web.Application, others: Collection[str] = ()) -> None:
    """Check each request of `app` before its handler sees it. `others`: origins that are served,
    too."""
    app.middlewares.append(_checked(frozenset(others)))


def _checked(others: frozenset[str]) -> Middleware:
    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        origins = request.headers.getall("origin", [])
        if not is_from_here([origin for origin in origins if origin not in others]):
            raise PermissionDenied(
                "origin: this port serves pages of this machine only; have API keys asked for "
                "(api_keys_file), name the page's origin in cors_origins, or say "
                "allow_anonymous=true where a proxy protects it"
            )
        return await handler(request)

    return checked


def is_from_here(origins: list[str]) -> bool:
    """Whether the Origin headers of one request name pages of this machine, or none."""
    try:
        return all(urlsplit(origin).hostname in LOOPBACK_NAMES for origin in origins)
    except ValueError:
        return False

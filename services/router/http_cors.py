"""Web pages from elsewhere that may use the API (CORS), by the setting `cors_origins`: a browser
asks before it sends a request that a page makes to another origin (a preflight), and shows the page
an answer only where the answer names the page's origin.

Only the paths of the API: what shows the cluster is for its own pages. Whether a request is served
at all, by its key, is not decided here. One asyncio loop.
"""

from __future__ import annotations

from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Middleware

from services.router.http_server import Handler

ANY = "*"

_PATHS = "/v1/"
_READABLE = "x-request-id, retry-after, retry-after-ms, x-should-retry"
"""Headers of an answer that a page may read, besides those that it always may."""
_MAX_AGE_S = 600
"""For which a browser need not ask again. Guessed: a setting that was changed holds soon."""


class Cors:
    """See the module."""

    def __init__(self, origins: Collection[str]) -> None:
        """`origins`: as `RouterSettings.cors_origins`."""
        self._origins = frozenset(origins)

    def add_to(self, app: web.Application) -> None:
        """Answer preflights, and name the origin in every answer to a page of it."""
        if self._origins:
            app.middlewares.append(self._preflights())
            app.on_response_prepare.append(self._allow)

    def _is_allowed(self, request: web.BaseRequest) -> bool:
        if not request.path.startswith(_PATHS):
            return False
        origin = request.headers.get("origin", "")
        return bool(origin) and (ANY in self._origins or origin in self._origins)

    def _preflights(self) -> Middleware:
        @web.middleware
        async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
            asked = request.headers
            is_preflight = "access-control-request-method" in asked
            if request.method != "OPTIONS" or not (is_preflight and self._is_allowed(request)):
                return await handler(request)
            # Every header of a request may come: clients have their own, and none opens anything.
            return web.Response(
                status=204,
                headers={
                    "access-control-allow-methods": "GET, POST",
                    "access-control-allow-headers": asked.get("access-control-request-headers", ""),
                    "access-control-max-age": str(_MAX_AGE_S),
                },
            )

        return answered

    async def _allow(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        if self._is_allowed(request):
            response.headers["access-control-allow-origin"] = request.headers["origin"]
            response.headers["access-control-expose-headers"] = _READABLE
            response.headers.add("vary", "origin")

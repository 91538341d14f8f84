"""Which certificates open the HTTP port, where clients are asked for one: those of clients and
admins; what shows the whole cluster, those of admins alone. A worker's or a store's opens nothing
here. One asyncio loop.
"""

from __future__ import annotations

from aiohttp import web

from process.authorization import PeerRole, names_of, roles_of
from process.errors import PermissionDenied
from process.tls import uris_of
from services.router.http_server import Handler

ALLOWED = frozenset({PeerRole.CLIENT, PeerRole.ADMIN})
ADMIN_PATHS = ("/live",)
"""What shows the whole cluster."""


def add_to(app: web.Application) -> None:
    """Check each request of `app` before anything else looks at it."""
    app.middlewares.append(_checked)


@web.middleware
async def _checked(request: web.Request, handler: Handler) -> web.StreamResponse:
    transport = request.transport
    peer = transport.get_extra_info("peercert") if transport is not None else None
    roles = roles_of(uris_of(peer))
    if not roles & ALLOWED:
        named = f"role {names_of(roles)}" if roles else "no role of Baton's (or several)"
        raise PermissionDenied(f"certificate: names {named}, which this port does not serve")
    if PeerRole.ADMIN not in roles and request.path.startswith(ADMIN_PATHS):
        named = names_of(roles)
        raise PermissionDenied(f"{request.path[:128]}: not for a certificate of role {named}")
    return await handler(request)

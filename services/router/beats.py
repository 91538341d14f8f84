"""This router's entry in the registry: what its traffic is, for the autoscaler, and what it does
with adapters, for other routers. The counts are `traffic`'s; how an entry lives and lapses is
`process.registry`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from google.protobuf import json_format

from process.registry import RedisAccess, RegistryHeartbeat
from protos import router_status_pb2
from services.router.traffic import Traffic

KIND = "router"


def make(
    redis_url: str,
    access: RedisAccess,
    *,
    router_id: str,
    incarnation: str,
    address: Callable[[], str],
    traffic: Traffic,
    adapters: Callable[[], Iterable[router_status_pb2.RouterAdapter]],
) -> RegistryHeartbeat:
    """Not started. `address`: where this router serves, by then."""

    began_s = time.monotonic()

    def entry() -> str:
        status = router_status_pb2.RouterStatus(
            router_id=router_id,
            incarnation=incarnation,
            address=address(),
            models=traffic.to_proto(),
            uptime_s=time.monotonic() - began_s,
            adapters=adapters(),
        )
        return json_format.MessageToJson(status, indent=None)

    return RegistryHeartbeat(
        redis_url,
        KIND,
        entry_id=router_id,
        incarnation=incarnation,
        entry=entry,
        access=access,
    )

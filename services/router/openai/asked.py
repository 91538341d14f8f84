"""One body understood: the request for the front desk, and how its answer is to look. Values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from process.errors import InvalidArgument
from protos import inference_pb2

_OWN = ("tenant", "session", "adapter", "priority", "budget_ms")


@dataclass(frozen=True)
class Look:
    """How the answer is to look."""

    is_streamed: bool = False
    has_usage: bool = False
    """A stream ends with the usage."""
    has_running_usage: bool = False
    """Every chunk of a stream has the usage so far."""
    has_account: bool = False
    """The answer says where its KV came from, and when what was done."""
    has_token_ids: bool = False


def look_of(body: Mapping[str, Any]) -> Look:
    """Raises: InvalidArgument for stream options without a stream."""
    options, own = body.get("stream_options", {}), body.get("baton", {})
    is_streamed = body.get("stream", False)
    if options and not is_streamed:
        raise InvalidArgument("stream_options", "needs stream: true")
    return Look(
        is_streamed,
        has_usage=options.get("include_usage", False),
        has_running_usage=options.get("continuous_usage_stats", False),
        has_account=own.get("provenance", False),
        has_token_ids=own.get("token_ids", False),
    )


def base_request(body: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """What both APIs say alike, without prompt and sampling."""
    request = inference_pb2.GenerateRequest(
        model=body.get("model", ""),
        session=body.get("prompt_cache_key", ""),
        show_special_tokens=not body.get("skip_special_tokens", True),
    )
    own = body.get("baton", {})
    for name in _OWN:
        if name in own:
            setattr(request, name, own[name])
    return request

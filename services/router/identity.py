"""Request ids, seeds, body digests, tenant salts and affinities, derived from the tenant and the
request. Pure, but for fresh ids.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence

import numpy as np
from google.protobuf.message import Message

from protos import inference_pb2

DEFAULT_TENANT = "default"

# Two blocks of the usual size, about the beginning of a system prompt. Guessed.
_AFFINITY_TOKENS = 32

_NOT_IN_BODY = frozenset({"request_id", "budget_ms", "token_ids"})


def fresh_request_id() -> str:
    """Return an id for a request that came without one."""
    return uuid.uuid4().hex


def seed_of(tenant: str, request_id: str) -> int:
    """Return the 64-bit seed of a request without one. Equal ids give equal seeds, so that a retry
    repeats the answer.
    """
    digest = hashlib.blake2b(digest_size=8, person=b"baton-seed-v1")
    for part in (tenant, request_id):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little")


def body_digest(request: inference_pb2.GenerateRequest) -> bytes:
    """Return a digest that is equal for requests that ask for the same answer. Request id and time
    budget do not count.
    """
    body = inference_pb2.GenerateRequest()
    for field, value in request.ListFields():
        if field.name in _NOT_IN_BODY:
            continue
        if isinstance(value, Message):
            getattr(body, field.name).CopyFrom(value)
        else:
            setattr(body, field.name, value)
    body.tenant = request.tenant or DEFAULT_TENANT
    data = body.SerializeToString(deterministic=True)
    digest = hashlib.blake2b(len(data).to_bytes(8, "little") + data, digest_size=32)
    # Token ids are many: in the message they would be copied and serialized one by one.
    digest.update(np.array(request.token_ids.ids, dtype=np.uint32).tobytes())
    return digest.digest()


def tenant_salt(tenant: str, secret: str) -> bytes:
    """Return the 32 bytes that key the tenant's chain hashes, so that tenants never share KV."""
    return hashlib.blake2b(
        tenant.encode(), key=secret.encode(), digest_size=32, person=b"baton-tenant-v1"
    ).digest()


def scope_salt(scope: str, secret: str) -> bytes:
    """Return the 32-byte salt of all tenants of `scope`; no tenant's name gives the same salt."""
    return hashlib.blake2b(
        scope.encode(), key=secret.encode(), digest_size=32, person=b"baton-scope-v1"
    ).digest()


def leg_id(request_id: str) -> str:
    """Return an id for one attempt at the workers, unique over all tenants and attempts."""
    return f"{request_id}#{uuid.uuid4().hex[:12]}"


def affinity(salt: bytes, session: str, prompt_token_ids: Sequence[int]) -> bytes:
    """Return 16 bytes that are equal for requests that should meet the same workers: those of one
    session, else those with equal first tokens. `salt`: requests with another salt share no KV.
    """
    key = session or repr(tuple(prompt_token_ids[:_AFFINITY_TOKENS]))
    return hashlib.blake2b(key.encode(), key=salt, digest_size=16).digest()

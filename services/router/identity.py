"""What is derived from who asks and what: request ids, seeds, body digests, tenant salts. Pure but
for fresh ids.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence

import numpy as np
from google.protobuf.message import Message

from protos import inference_pb2

DEFAULT_TENANT = "default"

# Two blocks of the usual size: about a system prompt's beginning. Guessed.
_AFFINITY_TOKENS = 32

_NOT_IN_BODY = frozenset({"request_id", "budget_ms", "token_ids"})


def fresh_request_id() -> str:
    """An id for a request that came without one."""
    return uuid.uuid4().hex


def seed_of(tenant: str, request_id: str) -> int:
    """The seed (64 bits) of a request without one: the same again for the same id, so that a retry
    repeats its answer.
    """
    digest = hashlib.blake2b(digest_size=8, person=b"baton-seed-v1")
    for part in (tenant, request_id):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little")


def body_digest(request: inference_pb2.GenerateRequest) -> bytes:
    """Equal for requests that ask for the same answer. Their ids and the time they leave do not
    count.
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
    # Many; as a message they would be copied, and written out number by number.
    digest.update(np.array(request.token_ids.ids, dtype=np.uint32).tobytes())
    return digest.digest()


def tenant_salt(tenant: str, secret: str) -> bytes:
    """32 bytes that go into each chain hash of `tenant`, so that tenants never share KV."""
    return hashlib.blake2b(
        tenant.encode(), key=secret.encode(), digest_size=32, person=b"baton-tenant-v1"
    ).digest()


def scope_salt(scope: str, secret: str) -> bytes:
    """32 bytes for all tenants of `scope`; derived apart, so that no tenant's name can give it."""
    return hashlib.blake2b(
        scope.encode(), key=secret.encode(), digest_size=32, person=b"baton-scope-v1"
    ).digest()


def leg_id(request_id: str) -> str:
    """Names one attempt at the workers, where ids of all tenants and attempts meet."""
    return f"{request_id}#{uuid.uuid4().hex[:12]}"


def affinity(salt: bytes, session: str, prompt_token_ids: Sequence[int]) -> bytes:
    """16 bytes, equal for requests that should meet the same workers: those of a session, else of
    equal first tokens. `salt`: requests of another one have nothing to find there.
    """
    key = session or repr(tuple(prompt_token_ids[:_AFFINITY_TOKENS]))
    return hashlib.blake2b(key.encode(), key=salt, digest_size=16).digest()

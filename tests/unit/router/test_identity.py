"""Seeds, digests, salts: equal when they must be, different otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from protos import inference_pb2
from services.router import identity


def _digest(**fields: Any) -> bytes:
    return identity.body_digest(inference_pb2.GenerateRequest(**fields))


def test_seeds() -> None:
    assert identity.seed_of("t", "r") == identity.seed_of("t", "r")
    assert identity.seed_of("t", "r") != identity.seed_of("t", "s")
    # Lengths are part of it: parts cannot run into each other.
    assert identity.seed_of("ab", "c") != identity.seed_of("a", "bc")
    assert 0 <= identity.seed_of("t", "r") < 2**64


def test_ids_and_time_left_are_not_part_of_a_body() -> None:
    base = _digest(text="a", sampling={"seed": 1})
    assert base == _digest(text="a", sampling={"seed": 1}, request_id="x", budget_ms=5)
    assert base == _digest(text="a", sampling={"seed": 1}, tenant="default")


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "b", "sampling": {"seed": 1}},
        {"text": "a"},
        {"text": "a", "sampling": {"seed": 2}},
        {"text": "a", "sampling": {"seed": 1}, "tenant": "t"},
        {"text": "a", "sampling": {"seed": 1}, "priority": 1},
        {"token_ids": {"ids": [1]}, "sampling": {"seed": 1}},
    ],
)
def test_anything_else_is(fields: dict[str, Any]) -> None:
    assert _digest(**fields) != _digest(text="a", sampling={"seed": 1})


def test_every_token_of_a_prompt_is_part_of_a_body() -> None:
    ids = list(range(8192))
    others = ([*ids[:-1], 0], ids[:-1], [*ids, 0], [1, *ids[1:]])
    digests = {_digest(token_ids={"ids": prompt}) for prompt in (ids, *others)}
    assert len(digests) == 5


def test_all_of_an_id_is_part_of_a_body() -> None:
    ids = (1, 1 + 2**8, 1 + 2**16, 1 + 2**24, 1 + 2**31)
    assert len({_digest(token_ids={"ids": [token]}) for token in ids}) == 5


def test_ids_and_the_rest_of_a_body_do_not_run_into_each_other() -> None:
    session = int.from_bytes(b"\x5a\x02ab", "little")  # "ab" as its field is written
    one = _digest(token_ids={"ids": [session, 7]}, tenant="t")
    assert one != _digest(token_ids={"ids": [7]}, tenant="t", session="ab")


def test_every_field_is_part_of_a_body_but_what_may_differ() -> None:
    def fields(name: str) -> Any:
        field = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name[name]
        known = {
            "chat": {"messages": [{"role": "user", "content": "x"}]},
            "token_ids": {"ids": [2]},
            "sampling": {"seed": 1},
        }
        return known.get(name, "x" if field.type == field.TYPE_STRING else 1)

    names = set(inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name)
    same = {name for name in names if _digest(**{name: fields(name)}) == _digest()}
    assert same == {"request_id", "budget_ms"}


def test_what_a_chat_says_is_part_of_a_body() -> None:
    one, other = ({"messages": [{"role": "user", "content": said}]} for said in "ab")
    assert _digest(chat=one) != _digest(chat=other)


def test_map_order_is_not_part_of_a_body() -> None:
    forward = {i: float(i) for i in range(50)}
    backward = dict(reversed(forward.items()))
    one, two = ({"logit_bias": bias} for bias in (forward, backward))
    assert _digest(sampling=one) == _digest(sampling=two)


def test_salts() -> None:
    assert len(identity.tenant_salt("t", "")) == 32
    salts = {identity.tenant_salt(t, s) for t in ("a", "b") for s in ("", "x")}
    assert len(salts) == 4


def test_affinity_follows_the_session_or_the_first_tokens() -> None:
    def affinity(session: str, ids: list[int], tenant: str = "t") -> bytes:
        return identity.affinity(identity.tenant_salt(tenant, "x"), session, ids)

    assert affinity("s", [1]) == affinity("s", [2])
    assert affinity("", [1] * 40) == affinity("", [1] * 50)
    assert affinity("", [1]) != affinity("", [2])
    assert affinity("s", [1]) != affinity("s", [1], tenant="u")


def test_leg_ids_never_repeat() -> None:
    assert identity.leg_id("r") != identity.leg_id("r")
    assert identity.leg_id("r").startswith("r#")

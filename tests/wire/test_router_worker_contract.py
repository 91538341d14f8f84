"""What the router may rely on about partial handles, held by real workers and by the fakes alike:
the router's tests are worth as much as the fakes are like the real ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from protos import common_pb2
from tests.harness.either_workers import MAX_TOKENS, PROMPT, Workers, fake_workers, real_workers

pytestmark = pytest.mark.oracle


@pytest.fixture(params=["fake", "real"])
async def workers(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Workers]:
    async with {"fake": fake_workers, "real": real_workers}[request.param](tmp_path) as made:
        yield made


def _partials(messages: Sequence[Any]) -> list[common_pb2.KvHandle]:
    return [message.handle for message in messages if message.handle.is_partial]


@pytest.mark.parametrize("num_samples", [1, 3])
async def test_partial_handles_come_before_the_account_and_grow(
    workers: Workers, num_samples: int
) -> None:
    request = workers.prefill_request(n=num_samples)
    messages = await workers.prefilled(request)
    *others, account = messages
    partials = _partials(messages)
    assert partials
    # Each is alone in its message; the rest is what it is without them.
    for message in others:
        says_more = bool(message.token_ids) or message.HasField("leg")
        assert message.handle.is_partial != says_more
    assert len([m for m in others if m.token_ids]) == num_samples
    assert account.HasField("leg") and not account.handle.is_partial
    # Only full blocks, never fewer than before, none that the last one has not.
    covered = [handle.num_tokens for handle in partials]
    assert covered == sorted(covered) and covered[0] > 0
    assert covered[-1] <= account.handle.num_tokens == len(PROMPT)
    assert all(num_tokens % 4 == 0 for num_tokens in covered)
    assert not any(handle.HasField("tail") for handle in partials)
    # No two are equal, so that one that comes twice is seen.
    nonces = [handle.nonce for handle in (*partials, account.handle)]
    assert len(set(nonces)) == len(nonces) and {len(nonce) for nonce in nonces} == {16}
    # What it names goes on under the same request.
    assert {handle.request_id for handle in partials} == {account.handle.request_id}
    await workers.serve_out(messages, num_samples)


async def test_nobody_is_told_early_of_what_is_not_handed_over(workers: Workers) -> None:
    request = workers.prefill_request()
    request.wants_handle = False
    if workers.holds is not None:
        workers.holds.release()
    messages = await workers.prefilled(request)
    assert not any(message.HasField("handle") for message in messages)


async def test_early_handles_change_no_token(workers: Workers) -> None:
    """Each of them, then the last; and then the same request without any."""
    request = workers.prefill_request()
    messages = await workers.prefilled(request)
    with_early = await workers.serve_out(messages)
    again = await workers.prefilled(request)
    without = await workers.serve_out([m for m in again if not m.handle.is_partial])
    assert with_early == without and len(with_early) == MAX_TOKENS - 1


async def test_an_early_handle_that_cannot_be_used_is_no_failure(workers: Workers) -> None:
    """Of nobody's making: another request's, and unsigned."""
    request = workers.prefill_request()
    messages = await workers.prefilled(request)
    forged = common_pb2.KvHandle(request_id="x", num_tokens=4, is_partial=True)
    assert len(await workers.serve_out(messages, early=[forged])) == MAX_TOKENS - 1


async def test_a_cancel_between_early_handles_has_one_last_word(workers: Workers) -> None:
    request = workers.prefill_request()
    messages = await workers.prefilled(request)
    first, *_ = _partials(messages)
    async with workers.stream() as stream:
        key = await stream.begin(workers.reserve())
        await stream.prefetch(key, first)
        await stream.cancel(key)
        await stream.prefetch(key, first)  # too late, as one may be that crossed the last word
        await stream.prefetch(key + 1_000_000, first)  # nobody's
        answer = await stream.collect(key)
        assert answer.finished is not None
        assert answer.finished.finish_reason == common_pb2.FINISH_REASON_CANCELLED
        # The stream still serves.
        assert len(await workers.decoded(stream, messages)) == MAX_TOKENS - 1
        assert [event.key for message in stream.messages for event in message.events].count(
            key
        ) == 2

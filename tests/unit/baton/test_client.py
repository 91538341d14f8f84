"""The client speaks the wire, cancels what nobody reads, and turns statuses into errors."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from baton import Client, SyncClient, errors
from baton.client import build_request
from protos import inference_pb2


async def test_chunks_then_an_end(router: Any) -> None:
    async with Client(router.address) as client:
        chunks = [chunk async for chunk in client.generate("hi")]
    assert [chunk.text for chunk in chunks] == ["Hel", "lo", "!"]
    assert [chunk.end is None for chunk in chunks] == [True, True, False]


async def test_complete_puts_everything_together(router: Any) -> None:
    async with Client(router.address) as client:
        completion = await client.complete("hi")
    assert completion.text == "Hello!"
    assert completion.token_ids == (1, 2, 3)
    assert (completion.finish_reason, completion.stop_token_id) == ("stop_token", 3)
    assert completion.seed == 11
    assert completion.usage.num_prompt_tokens == 40
    assert list(completion.times) == ["tokenize", "decode"]
    decode = completion.provenance.legs[1]
    assert decode.num_tokens_from_store == 32
    assert decode.from_store[0].tier == "host"
    assert decode.recomputed == {"checksum": 1}
    assert (decode.num_tokens_early, decode.num_blocks_written_back) == (16, 2)
    assert completion.provenance.num_bytes_moved == 5120 + 4096


async def test_leaving_early_cancels_on_the_server(router: Any) -> None:
    router.messages, router.hang = router.messages[:2], True
    async with Client(router.address) as client:
        chunks = client.generate("hi")
        assert (await anext(chunks)).text == "Hel"
        await chunks.aclose()
        assert await asyncio.to_thread(router.cancelled.wait, 30)


def test_sync_client_streams_and_cancels(router: Any) -> None:
    router.messages, router.hang = router.messages[:2], True
    with SyncClient(router.address) as client:
        for chunk in client.generate("hi"):
            assert chunk.text == "Hel"
            break
        assert router.cancelled.wait(30)


def test_sync_client_closes_twice_and_completes(router: Any) -> None:
    client = SyncClient(router.address)
    assert client.complete("hi").text == "Hello!"
    assert [model.model for model in client.models()] == ["tiny"]
    assert client.status() == inference_pb2.GetClusterStatusReply()
    client.close()
    client.close()


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (errors.InvalidArgument("sampling.top_p", "must be in (0, 1]"), errors.InvalidArgument),
        (errors.NotFound("no such model"), errors.NotFound),
        (errors.AlreadyExists("in flight"), errors.AlreadyExists),
        (errors.FailedPrecondition("layout"), errors.FailedPrecondition),
        (errors.NoCapacity("full", retry_after_s=2.5), errors.NoCapacity),
        (errors.Unavailable("no worker", retry_after_s=0.5), errors.Unavailable),
        (errors.DeadlineExceeded("over"), errors.DeadlineExceeded),
        (errors.Internal("ours"), errors.Internal),
    ],
)
async def test_errors_come_through_whole(
    router: Any, raised: errors.BatonError, kind: type[errors.BatonError]
) -> None:
    router.fail = raised
    async with Client(router.address) as client:
        with pytest.raises(kind) as caught:
            await client.complete("hi")
    assert caught.value.retry_after_s == raised.retry_after_s
    if isinstance(raised, errors.InvalidArgument):
        assert isinstance(caught.value, errors.InvalidArgument)
        assert caught.value.field == raised.field
        assert str(caught.value) == str(raised)


async def test_the_clients_own_deadline(router: Any) -> None:
    router.messages, router.hang = [], True
    async with Client(router.address) as client:
        with pytest.raises(errors.DeadlineExceeded) as caught:
            await client.complete("hi", timeout_s=0.2)
    assert str(caught.value) == (
        f"{router.address} was asked for a whole answer, which was not there within 0.2 s; ask for "
        "fewer tokens, or give it more time (timeout_s)"
    )


async def test_a_router_that_says_nothing_is_told_with_what_to_check() -> None:
    """One that takes the connection and never answers: a port that is no gRPC server's, say."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        await _check_silence(address)


async def _check_silence(address: str) -> None:
    async with Client(address) as client:
        for asked, call in (
            ("its models", lambda: client.models(0.2)),
            ("its status", lambda: client.status(0.2)),
            ("why it chose its workers", lambda: client.explain(timeout_s=0.2)),
        ):
            with pytest.raises(errors.DeadlineExceeded) as caught:
                await call()
            told = f"{address} was asked for {asked}, which was not there within 0.2 s; check"
            assert str(caught.value).startswith(told)


async def test_what_a_router_says_of_its_deadline_is_left_as_it_is(router: Any) -> None:
    router.fail = errors.DeadlineExceeded("decode: the request's time was over")
    async with Client(router.address) as client:
        with pytest.raises(errors.DeadlineExceeded, match=r"^decode: the request's time"):
            await client.complete("hi")


async def test_nobody_there_says_what_to_do() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(errors.Unavailable, match="baton up"):
            await client.complete("hi")


async def test_a_stream_without_its_end_is_an_error(router: Any) -> None:
    """A half answer must never look like a whole one."""
    router.messages = router.messages[:2]
    async with Client(router.address) as client:
        with pytest.raises(errors.Internal, match="last message"):
            await client.complete("hi")


def test_prompts_of_each_kind() -> None:
    assert build_request("text").text == "text"
    assert list(build_request([1, 2]).token_ids.ids) == [1, 2]
    assert build_request([]).WhichOneof("prompt") == "token_ids"
    chat = build_request([{"role": "user", "content": "hi"}]).chat
    assert [(message.role, message.content) for message in chat.messages] == [("user", "hi")]


def test_options_reach_the_wire_and_none_does_not() -> None:
    request = build_request(
        "x", max_tokens=3, temperature=0.0, seed=0, stop="end", timeout_s=1.5, tenant="t"
    )
    sampling = request.sampling
    assert sampling.HasField("temperature") and sampling.HasField("seed")
    assert not sampling.HasField("top_p") and not sampling.HasField("top_k")
    assert list(sampling.stop) == ["end"]
    assert (request.budget_ms, request.tenant) == (1500, "t")


def test_every_sampling_field_can_be_asked_for() -> None:
    """One option for each field of the wire, so that none is left to somebody else."""
    sampling = build_request(
        "x",
        **{name: 1 for name in ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs")},
        **{name: 0.5 for name in ("temperature", "top_p", "min_p", "presence_penalty")},
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        no_repeat_ngram=3,
        stop=["a"],
        stop_token_ids=[1],
        include_stop_text=True,
        stop_at_tool_call=True,
        ignore_eos=True,
        logit_bias={3: -1.0},
        allowed_token_ids=[3],
        bad_words=["no", [4, 5]],
        num_beams=2,
        trace=True,
        regex="a*",
    ).sampling
    asked = {field.name for field, _ in sampling.ListFields()}
    grammars = {"json_schema", "ebnf", "choice"}
    assert asked == {field.name for field in sampling.DESCRIPTOR.fields} - grammars
    assert list(sampling.bad_words) == ["no"] and list(sampling.bad_word_ids[0].ids) == [4, 5]
    assert dict(sampling.logit_bias) == {3: -1.0}


def test_grammars_of_each_kind() -> None:
    assert build_request("x", json_schema={"type": "object"}).sampling.json_schema == (
        '{"type": "object"}'
    )
    assert build_request("x", json_schema=True).sampling.json_schema == "true"
    assert build_request("x", json_schema="{}").sampling.json_schema == "{}"
    assert build_request("x", ebnf="root ::= x").sampling.ebnf == "root ::= x"
    assert list(build_request("x", choice=["a", "b"]).sampling.choice.values) == ["a", "b"]
    assert build_request("x", choice=[]).sampling.WhichOneof("grammar") == "choice"


async def test_samples_end_one_by_one_and_share_the_account(router: Any) -> None:
    first, second, last = router.messages
    first.sample_index, second.sample_index, last.sample_index = 1, 0, 1
    second.finish_reason = 4  # LENGTH
    second.seed = 11
    async with Client(router.address) as client:
        completions = await client.complete_samples("hi", n=2)
    assert [(c.sample_index, c.text, c.finish_reason) for c in completions] == [
        (0, "lo", "length"),
        (1, "Hel!", "stop_token"),
    ]
    assert completions[0].provenance == completions[1].provenance
    with pytest.raises(errors.InvalidArgument, match="complete_samples"):
        async with Client(router.address) as client:
            await client.complete("hi", n=2)


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([-1], {}, "prompt"),
        ([1 << 32], {}, "prompt"),
        ("\ud800", {}, "prompt"),
        ([{"role": "user", "words": "x"}], {}, "prompt"),
        ("x", {"top_k": -1}, "sampling"),
        ("x", {"max_tokens": -5}, "sampling"),
        ("x", {"seed": 1 << 64}, "sampling"),
        ("x", {"n": -1}, "sampling"),
        ("x", {"logit_bias": {-1: 1.0}}, "sampling"),
        ("x", {"bad_words": [[-1]]}, "sampling"),
        ("x", {"allowed_token_ids": []}, "sampling.allowed_token_ids"),
        ("x", {"allowed_token_ids": [-1]}, "sampling.allowed_token_ids"),
        ("x", {"regex": "a", "ebnf": "b"}, "sampling.ebnf"),
        ("x", {"choice": [1]}, "sampling.choice"),
        ("x", {"num_beams": -2}, "sampling.beam"),
        ("x", {"length_penalty": 1.0}, "sampling.beam.length_penalty"),
        ("x", {"early_stopping": True}, "sampling.beam.early_stopping"),
        ("x", {"priority": 1 << 40}, "request"),
    ],
)
def test_what_cannot_be_said_on_the_wire_names_the_field(
    prompt: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        build_request(prompt, **options)
    assert caught.value.field == field

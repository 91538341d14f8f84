"""Every engine client does what the others do: the same tokens, the same refusals, the same ends.

The engines are real ones with the small bundled model; those in processes of their own are shared
by this module's tests, and each test leaves them empty and with their laws kept.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import transformers

from checkpoints.resolve import resolve
from engine.config import EngineConfig
from engine.request import FinishReason, Sampling
from engine_client.interface import Ask, EngineClient, News
from engine_client.llm import ClientLLM
from engine_client.params import SamplingParams
from process.rpc_errors import AlreadyExists, BatonError, DeadlineExceeded, InvalidArgument
from tests.conftest import LONG
from tests.harness.adapters import save_adapter
from tests.harness.engine_clients import KINDS as ALL_KINDS
from tests.harness.engine_clients import AsyncFace, make_client
from tokens.chat_template import ChatTemplate
from tokens.tokenizer import Tokenizer

MODEL = "baton-5m-draft"
CONFIG = EngineConfig(
    model=MODEL, num_blocks=160, max_num_running=4, max_num_tokens_per_step=64, num_threads=1
)
# One process is several, of which there is one: test_engine_client_ends.py has both each time.
KINDS = tuple(kind for kind in ALL_KINDS if LONG or kind != "process")
BOUND_S = 60.0
"""No wait of a test is longer; none should come near it."""

numbers = itertools.count(1)


@pytest.fixture(scope="module")
def clients() -> Iterator[dict[str, EngineClient]]:
    """One client of each kind, started together."""
    with ThreadPoolExecutor(len(KINDS)) as threads:
        made = dict(
            zip(KINDS, threads.map(lambda kind: make_client(kind, CONFIG), KINDS), strict=True)
        )
    yield made
    with ThreadPoolExecutor(len(KINDS)) as threads:
        list(threads.map(lambda client: client.close(), made.values()))
    made_async = made["async"]
    assert isinstance(made_async, AsyncFace)
    made_async.end_loop()


@pytest.fixture(params=KINDS)
def client(
    request: pytest.FixtureRequest, clients: dict[str, EngineClient]
) -> Iterator[EngineClient]:
    """A client that is empty before and after the test."""
    client = clients[request.param]
    yield client
    finish(client, ())
    client.check_integrity()
    for stats in client.stats():
        assert stats.num_waiting == stats.num_running == stats.num_reserved == 0
        assert stats.num_referenced_blocks == 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve(MODEL, files="tokenizer").path)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    found = ChatTemplate.find(resolve(MODEL, files="tokenizer").path)
    assert found is not None
    return found


def make_ask(
    prompt: Sequence[int], *, name: str = "", salt: bytes = b"", **sampling: object
) -> Ask:
    fields = {"max_tokens": 12, "ignore_eos": True} | sampling
    return Ask(
        request_id=name or f"ask-{next(numbers)}",
        prompt_token_ids=tuple(prompt),
        sampling=Sampling(**fields),  # type: ignore[arg-type]
        salt=salt,
    )


def finish(client: EngineClient, names: Sequence[str]) -> list[News]:
    """News until all of `names` are over, and nothing is left to receive."""
    news: list[News] = []
    is_open = set(names)
    ends_s = time.monotonic() + BOUND_S
    while is_open:
        assert time.monotonic() < ends_s, f"{sorted(is_open)} are not over"
        for each in client.receive(1.0):
            news.append(each)
            if each.is_over:
                is_open.remove(each.request_id)
    while more := client.receive(0.0):
        news += more
    return news


def serve(client: EngineClient, asks: Sequence[Ask]) -> dict[str, tuple[int, ...]]:
    """Token ids by ask. Each must end by itself."""
    for ask in asks:
        client.submit(ask)
    outputs: dict[str, tuple[int, ...]] = {ask.request_id: () for ask in asks}
    for news in finish(client, list(outputs)):
        assert news.failure is None, news.failure
        outputs[news.request_id] += news.token_ids
    return outputs


def random_asks(seed: int, num: int) -> list[Ask]:
    """Greedy and sampled, short and of several chunks, some with a common beginning."""
    rng = random.Random(seed)
    common = [rng.randrange(8, 2000) for _ in range(40)]
    asks = []
    for index in range(num):
        prompt = [rng.randrange(8, 2000) for _ in range(rng.choice((1, 5, 30, 150)))]
        if index % 3 == 0:
            prompt = common + prompt
        sampling = {"temperature": 0.0} if index % 2 else {"temperature": 0.9, "top_p": 0.95}
        asks.append(
            make_ask(
                prompt,
                name=f"random-{next(numbers)}",
                seed=rng.randrange(2**64),
                max_tokens=rng.randrange(1, 30),
                ignore_eos=bool(index % 5),
                logprobs=2,
                **sampling,
            )
        )
    return asks


def test_outputs_equal_the_engines_in_this_process(
    clients: dict[str, EngineClient], seed: int, scale: Callable[[int], int]
) -> None:
    """A process border, balancing and other batches change no token."""
    asks = random_asks(seed, scale(400))
    expected = serve(clients["in_process"], asks)
    for kind in KINDS[1:]:
        assert serve(clients[kind], asks) == expected, kind


def test_news_tell_each_token_once_and_the_end_once(client: EngineClient, seed: int) -> None:
    asks = random_asks(seed + 1, 24)
    for ask in asks:
        client.submit(ask)
    news = finish(client, [ask.request_id for ask in asks])
    for ask in asks:
        own = [each for each in news if each.request_id == ask.request_id]
        assert [each.is_over for each in own] == [False] * (len(own) - 1) + [True]
        assert [each.finish_reason is not None for each in own] == [each.is_over for each in own]
        num_tokens = sum(len(each.token_ids) for each in own)
        if own[-1].finish_reason is FinishReason.LENGTH:
            assert num_tokens == ask.sampling.max_tokens
        else:
            assert own[-1].finish_reason is FinishReason.EOS
            assert own[-1].stop_token_id == own[-1].token_ids[-1]
        for each in own:
            assert each.logprobs is not None
            assert [entry.token_id for entry in each.logprobs] == list(each.token_ids)
            assert all(len(entry.top) == 2 for entry in each.logprobs)


def test_a_prompts_log_probabilities_are_those_that_it_was_drawn_with(
    client: EngineClient, tokenizer: Tokenizer, seed: int
) -> None:
    llm = ClientLLM(client, tokenizer=tokenizer)
    prompt = random.Random(seed).choices(range(8, 2000), k=70)
    params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, logprobs=2)
    (drawn,) = llm.generate([prompt], params, progress=False)
    assert drawn.prompt_logprobs is None and drawn.samples[0].logprobs is not None
    again = SamplingParams(max_tokens=1, prompt_logprobs=2)
    (answer,) = llm.generate([[*prompt, *drawn.token_ids]], again, progress=False)
    found = answer.prompt_logprobs
    assert found is not None and answer.usage.num_cached_tokens == 0
    assert [one.token_id for one in found] == [*prompt, *drawn.token_ids]
    assert math.isnan(found[0].logprob) and found[0].top == ()
    for one, expected in zip(found[len(prompt) :], drawn.samples[0].logprobs, strict=True):
        assert one.logprob == pytest.approx(expected.logprob, abs=1e-3)
        assert [value for _, value in one.top] == pytest.approx(
            [value for _, value in expected.top], abs=1e-3
        )


def test_samples_of_one_prompt(clients: dict[str, EngineClient], seed: int) -> None:
    """n samples are n asks with sample indices of their own, and differ."""
    prompt = random.Random(seed).choices(range(8, 2000), k=21)
    base = make_ask(prompt, name=f"n-{next(numbers)}", temperature=1.0, seed=seed, max_tokens=8)
    alone = [
        dataclasses.replace(
            base,
            request_id=f"alone-{index}",
            sampling=dataclasses.replace(base.sampling, sample_index=index),
        )
        for index in range(3)
    ]
    expected = list(serve(clients["in_process"], alone).values())
    assert len(set(expected)) > 1
    for kind in KINDS:
        clients[kind].submit(dataclasses.replace(base, num_samples=3))
        outputs: list[tuple[int, ...]] = [(), (), ()]
        for news in finish(clients[kind], [base.request_id]):
            outputs[news.sample_index] += news.token_ids
        assert outputs == expected, kind


def test_the_prefix_cache_is_kept_and_salted(client: EngineClient, seed: int) -> None:
    prompt = random.Random(seed).choices(range(8, 2000), k=70)
    rank = client.num_engines - 1

    def num_cached(salt: bytes) -> int:
        ask = make_ask(prompt, salt=salt)
        client.submit(ask, rank=rank)
        return finish(client, [ask.request_id])[0].num_cached_tokens

    mine = random.Random(seed).randbytes(8) + str(next(numbers)).encode()
    assert num_cached(mine) == 0
    assert num_cached(mine) == 64
    assert num_cached(mine + b"other") == 0


def test_stop_strings_and_text(
    client: EngineClient, tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    """Text ends at the stop string, nothing beyond it counts, and the engine is told to end."""
    llm = ClientLLM(client, tokenizer=tokenizer, template=template)
    greedy = SamplingParams(temperature=0, max_tokens=30)
    (whole,) = llm.generate("Once upon a time", greedy, progress=False)
    assert whole.text.startswith(", there was")
    stop = whole.text[20:26]
    before = whole.text[: whole.text.index(stop)]
    params = dataclasses.replace(greedy, stop=stop)
    cut, neighbour = llm.generate(
        ["Once upon a time"] * 2, [params, greedy], progress=False, timeout_s=BOUND_S
    )
    assert (cut.text, cut.finish_reason) == (before, "stop_string")
    assert cut.samples[0].stop_string == stop
    assert len(cut.token_ids) < 30 and cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert cut.usage.num_output_tokens == len(cut.token_ids)
    assert neighbour.text == whole.text
    with_stop = dataclasses.replace(params, include_stop_text=True)
    assert llm.generate("Once upon a time", with_stop, progress=False)[0].text == before + stop
    (chat,) = llm.chat([{"role": "user", "content": "hi"}], greedy, progress=False)
    assert chat.prompt == "<|user|>hi<|end|><|assistant|>" and chat.text


def test_a_sample_ends_alone(client: EngineClient, tokenizer: Tokenizer, seed: int) -> None:
    """One sample's stop string ends that one; the other goes on to the same tokens."""
    llm = ClientLLM(client, tokenizer=tokenizer)
    params = SamplingParams(n=2, temperature=1.0, max_tokens=40, ignore_eos=True, seed=seed)
    (free,) = llm.generate("The dog", params, progress=False)
    first, second = free.samples
    # Somewhere early in the first, and not in the second.
    stops = [first.text[at : at + 6] for at in range(4, 60)]
    stop = next(one for one in stops if one not in second.text)
    (cut,) = llm.generate("The dog", dataclasses.replace(params, stop=stop), progress=False)
    assert cut.samples[1] == second
    assert cut.samples[0].text == first.text[: first.text.index(stop)]
    assert cut.samples[0].finish_reason == "stop_string"


def test_ending_every_sample_ends_the_ask(client: EngineClient) -> None:
    ask = dataclasses.replace(make_ask([5, 6], max_tokens=700), num_samples=3)
    client.submit(ask)
    news: list[News] = []
    ends_s = time.monotonic() + BOUND_S
    while not news:
        assert time.monotonic() < ends_s
        news += client.receive(1.0)
    assert news[0].failure is None
    for index in (2, 0, 0, 1, 1):
        client.end_sample(ask.request_id, index)
    client.end_sample("nobody", 0)
    last = finish(client, [ask.request_id])[-1]
    assert last.is_over and not last.token_ids and last.failure is None
    assert last.finish_reason is None


def test_metrics_count_what_was_done(client: EngineClient, seed: int) -> None:
    def counts() -> tuple[int, int]:
        each = client.metrics()
        return sum(one.num_output_tokens for one in each), sum(one.ttft_s.count for one in each)

    num_tokens, num_first = counts()
    serve(client, [make_ask([5, index + 8], max_tokens=7) for index in range(8)])
    assert counts() == (num_tokens + 56, num_first + 8)
    for metrics in client.metrics():
        assert metrics.num_blocks == 160 and metrics.num_live_requests == 0


def test_adapters_come_and_go_and_change_the_output(
    client: EngineClient, tokenizer: Tokenizer, adapter_folder: Path
) -> None:
    """At every engine; an unknown one is refused by name, before any work."""
    llm = ClientLLM(client, tokenizer=tokenizer)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = ["Once upon a time", "The cat", "A dog", "In a house"]
    plain = [answer.text for answer in llm.generate(prompts, greedy, progress=False)]
    loaded = llm.load_adapter("mine", adapter_folder)
    assert llm.adapters() == (loaded,) and loaded.rank == 4
    tuned = [a.text for a in llm.generate(prompts, greedy, adapter="mine", progress=False)]
    assert all(with_it != without for with_it, without in zip(tuned, plain, strict=True))
    again = [a.text for a in llm.generate(prompts, greedy, progress=False)]
    assert again == plain, "cached KV of the adapter must not be met without it"
    llm.unload_adapter("mine")
    assert llm.adapters() == ()
    with pytest.raises(InvalidArgument, match=r"^prompts\[0\]\.adapter: 'mine' is not loaded"):
        llm.generate(prompts, greedy, adapter="mine", progress=False)
    with pytest.raises(BatonError, match="mine"):
        llm.unload_adapter("mine")
    with pytest.raises(InvalidArgument, match="adapter_config"):
        llm.load_adapter("none", adapter_folder.parent)


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random adapter for the model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(resolve(MODEL, files="all").path)
    return save_adapter(tmp_path_factory.mktemp("lora") / "mine", model, 1, strength=2.0)


def test_beams_are_the_same_everywhere(
    clients: dict[str, EngineClient], tokenizer: Tokenizer
) -> None:
    """The best hypotheses come at the end, best first, with their scores."""
    params = SamplingParams(num_beams=3, n=2, max_tokens=10)
    expected = None
    for kind in KINDS:
        llm = ClientLLM(clients[kind], tokenizer=tokenizer)
        (answer,) = llm.generate("Once upon a time", params, progress=False, timeout_s=BOUND_S)
        first, second = answer.samples
        assert first.score is not None and second.score is not None
        assert first.score >= second.score and first.token_ids != second.token_ids
        expected = expected or answer.samples
        assert answer.samples == expected, kind


def test_grammars_are_followed(client: EngineClient, tokenizer: Tokenizer) -> None:
    """More of them at once than an engine compiles at a time; a broken one fails alone."""
    llm = ClientLLM(client, tokenizer=tokenizer)
    choices = [[f"yes {index}", f"no {index}"] for index in range(12)]
    params = [SamplingParams(choice=each, max_tokens=40) for each in choices]
    broken = SamplingParams(regex="(", max_tokens=5)
    answers = llm.generate(
        ["Say"] * 13, [*params, broken], progress=False, timeout_s=BOUND_S, return_errors=True
    )
    for answer, each in zip(answers[:12], choices, strict=True):
        assert answer.text in each
    assert isinstance(answers[12].error, InvalidArgument) and answers[12].finish_reason == "error"
    with pytest.raises(InvalidArgument, match=r"^prompts\[1\]\.grammar: "):
        llm.generate(["a", "b"], [SamplingParams(), broken], progress=False, timeout_s=BOUND_S)
    drain(client)


def test_generate_ends_in_time_and_leaves_nothing(
    client: EngineClient, tokenizer: Tokenizer
) -> None:
    """A deadline cancels what is left; the fixture sees that the engine is empty."""
    llm = ClientLLM(client, tokenizer=tokenizer)
    params = SamplingParams(max_tokens=1500, ignore_eos=True)
    with pytest.raises(DeadlineExceeded, match="12 of 12 prompts"):
        llm.generate(["Once"] * 12, params, progress=False, timeout_s=0.0)
    drain(client)


def drain(client: EngineClient) -> None:
    """Take what was told about asks that nobody follows any more."""
    ends_s = time.monotonic() + BOUND_S
    while any(stats.num_running + stats.num_waiting for stats in client.stats()):
        assert time.monotonic() < ends_s
        client.receive(0.05)
    client.receive(0.05)


def test_bad_parameters_name_prompt_and_field_before_any_work(
    client: EngineClient, tokenizer: Tokenizer
) -> None:
    llm = ClientLLM(client, tokenizer=tokenizer)
    num_before = sum(stats.num_computed_tokens for stats in client.stats())
    fine, prompts = SamplingParams(), ["a", "b", "c"]
    for bad, field in (
        (SamplingParams(temperature=-1.0), "temperature"),
        (SamplingParams(top_p=0.0), "top_p"),
        (SamplingParams(max_tokens=0), "max_tokens"),
        (SamplingParams(max_tokens=10**6), "max_tokens"),
        (SamplingParams(max_tokens="many"), "max_tokens"),  # type: ignore[arg-type]
        (SamplingParams(logprobs=1000), "logprobs"),
        (SamplingParams(prompt_logprobs=1000), "prompt_logprobs"),
        (SamplingParams(seed=-1), "seed"),
        (SamplingParams(stop=["x", ""]), r"stop\[1\]"),
        (SamplingParams(n=0), "n"),
    ):
        with pytest.raises(InvalidArgument, match=rf"^prompts\[1\]\.{field}: "):
            llm.generate(prompts, [fine, bad, fine], progress=False)
    with pytest.raises(InvalidArgument, match=r"^prompts\[2\]"):
        llm.generate(["a", "b", ""], progress=False)
    with pytest.raises(InvalidArgument, match=r"^prompts\[1\]\.prompt_token_ids: "):
        llm.generate([[5], [2**31]], progress=False)
    with pytest.raises(InvalidArgument, match=r"^params: 2 of them for 3 prompts"):
        llm.generate(prompts, [fine] * 2, progress=False)
    assert sum(stats.num_computed_tokens for stats in client.stats()) == num_before


def test_a_bad_ask_is_told_as_its_only_news_and_harms_no_other(client: EngineClient) -> None:
    good = make_ask([5, 6, 7], max_tokens=20)
    expected = serve(client, [good])[good.request_id]
    bad = [
        make_ask([5], temperature=float("nan")),
        make_ask([], max_tokens=3),
        make_ask([5], max_tokens="x"),
        make_ask([10**9]),
    ]
    client.submit(good)
    for ask in bad:
        client.submit(ask)
    news = finish(client, [good.request_id, *(ask.request_id for ask in bad)])
    for ask in bad:
        (only,) = [each for each in news if each.request_id == ask.request_id]
        assert only.failure is not None and only.is_over and not only.token_ids
        assert isinstance(only.failure.to_error(), InvalidArgument)
    own = [each.token_ids for each in news if each.request_id == good.request_id]
    assert tuple(itertools.chain(*own)) == expected


def test_check_names_the_ask(client: EngineClient) -> None:
    """Also beyond what one question to a process holds."""
    asks = [make_ask([5]) for _ in range(300)]
    client.check(asks)
    client.check([])
    asks[290] = make_ask([5], top_k=-1)
    with pytest.raises(InvalidArgument, match=r"^asks\[290\]\.(sampling\.)?top_k: ") as caught:
        client.check(asks)
    assert caught.value.field.startswith("asks[290].")


def test_cancel_in_each_state(client: EngineClient) -> None:
    """In the line, in the engine, over, unknown; the others never notice."""
    client.cancel("nobody")
    long = [make_ask([9, 8, index + 8], max_tokens=1200) for index in range(6)]
    # More than an engine takes in at once, so that some are in the line.
    short = [make_ask([3, index + 8], max_tokens=3) for index in range(40 * client.num_engines)]
    for ask in [*long, *short]:
        client.submit(ask)
    news: list[News] = []
    ends_s = time.monotonic() + BOUND_S
    while not any(each.request_id == long[0].request_id for each in news):
        assert time.monotonic() < ends_s
        news += client.receive(1.0)
    for ask in [*long, short[-1]]:
        client.cancel(ask.request_id)
    over = {each.request_id for each in news if each.is_over}
    still = [ask.request_id for ask in [*long, *short] if ask.request_id not in over]
    news += finish(client, still)
    for ask in long:
        last = [each for each in news if each.request_id == ask.request_id][-1]
        assert last.is_over and last.failure is not None and last.failure.kind == "Cancelled"
    for ask in short[:-1]:
        own = [each for each in news if each.request_id == ask.request_id]
        assert own[-1].finish_reason is FinishReason.LENGTH
        assert sum(len(each.token_ids) for each in own) == 3
    client.cancel(long[0].request_id)  # over
    assert serve(client, [dataclasses.replace(long[0], sampling=Sampling(max_tokens=1))])


def test_an_id_that_is_live_is_refused(client: EngineClient) -> None:
    ask = make_ask([5, 6], max_tokens=300)
    client.submit(ask)
    with pytest.raises(AlreadyExists, match=ask.request_id):
        client.submit(ask)
    client.cancel(ask.request_id)
    finish(client, [ask.request_id])
    assert serve(client, [dataclasses.replace(ask, sampling=Sampling(max_tokens=2))])


def test_a_rank_is_what_the_caller_says(client: EngineClient) -> None:
    """External balancing: every ask at the last engine, whatever its load."""
    with pytest.raises(InvalidArgument, match=r"^rank: "):
        client.submit(make_ask([5]), rank=client.num_engines)
    with pytest.raises(InvalidArgument, match=r"^rank: "):
        client.submit(make_ask([5]), rank=-1)
    before = [stats.num_output_tokens for stats in client.stats()]
    asks = [make_ask([5, index + 8]) for index in range(6)]
    for ask in asks:
        client.submit(ask, rank=client.num_engines - 1)
    finish(client, [ask.request_id for ask in asks])
    after = [stats.num_output_tokens for stats in client.stats()]
    grown = [new - old for new, old in zip(after, before, strict=True)]
    assert grown == [0] * (client.num_engines - 1) + [72]


def test_internal_balancing_uses_every_engine(clients: dict[str, EngineClient]) -> None:
    client = clients["data_parallel"]
    before = [stats.num_output_tokens for stats in client.stats()]
    serve(client, [make_ask([5, index + 8]) for index in range(10)])
    after = [stats.num_output_tokens for stats in client.stats()]
    grown = [new - old for new, old in zip(after, before, strict=True)]
    assert sum(grown) == 120 and min(grown) >= 36

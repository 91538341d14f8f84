"""A router with its HTTP port open, fake workers behind it, and models that say what a test wants.

`served` runs one in a thread with a loop of its own, for clients that block and for many tests of
one module.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from protos import common_pb2
from services.router.fakes.model import FakeModel
from services.router.fakes.worker import FakeWorker
from services.router.model import Model
from tests.harness import router_bench
from tests.harness.router_bench import Bench, fake_model, running
from tokens.chat_template import ChatTemplate

TOOL_TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    'call as <tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
    "{% for m in messages %}{{ m.role }}: "
    "{{ '(' + m.reasoning_content + ')' if m.reasoning_content else '' }}{{ m.content }}"
    "{% for c in m.tool_calls or () %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}{{ ' re ' + m.tool_call_id if m.tool_call_id else '' }}\n{% endfor %}"
    "{{ mood or '' }}assistant:"
)
"""One that takes tools in the tagged form."""


@dataclass(frozen=True)
class ScriptedModel(FakeModel):
    """Says its script, token by token, then ends; sample by sample the same."""

    script: tuple[int, ...] = ()

    def token(
        self,
        prompt: Sequence[int],
        params: common_pb2.SamplingParams,
        position: int,
        sample_index: int = 0,
    ) -> int:
        """The output token at `position`."""
        return self.script[position] if position < len(self.script) else self.eos_token_id


def saying(text: str) -> ScriptedModel:
    """A model whose every answer is `text`."""
    base = fake_model()
    return ScriptedModel(
        alphabet=base.alphabet,
        eos_token_id=base.eos_token_id,
        vocab_size=base.vocab_size,
        context_window=4096,
        script=tuple(router_bench.TOKENIZER.encode(text)),
    )


class HttpBench(Bench):
    """A bench whose model has the tools' template."""

    @property
    def model_for_router(self) -> Model:
        model = super().model_for_router
        model.template = ChatTemplate(TOOL_TEMPLATE, special_tokens={})
        return model

    @property
    def url(self) -> str:
        return f"http://{self.router.http_address}"

    async def publish(self, worker: FakeWorker, *, ttl_ms: int = 3_600_000) -> None:
        """As a bench does; it has to last for all tests of a module."""
        await super().publish(worker, ttl_ms=ttl_ms)


@asynccontextmanager
async def http_bench(**options: Any) -> AsyncIterator[HttpBench]:
    """`bench.running` with the HTTP port open."""
    async with running(http_listen="127.0.0.1:0", make=HttpBench, **options) as bench:
        assert isinstance(bench, HttpBench)
        yield bench


@dataclass
class Served:
    """A bench in a thread of its own."""

    bench: HttpBench
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return self.bench.url

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine where the router runs."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)


@contextlib.contextmanager
def served(**options: Any) -> Iterator[Served]:
    """See `Served`; on leaving, nothing may be left over."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="http-bench")
    thread.start()
    bench = http_bench(**options)
    try:
        entered = asyncio.run_coroutine_threadsafe(bench.__aenter__(), loop).result(20)
        yield Served(entered, loop)
        asyncio.run_coroutine_threadsafe(bench.__aexit__(None, None, None), loop).result(20)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()

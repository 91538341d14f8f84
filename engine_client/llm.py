"""LLM: a model as a Python object, with text in, answers out, and many prompts at once.

    with LLM("baton-5m") as llm:
        for answer in llm.generate(["Once upon a time", "A dog"], SamplingParams(max_tokens=40)):
            ...

Life of a call of `generate`: everything is translated and checked -> all asks are submitted -> news
are taken until all is over. Whatever ends it early cancels what is left.

One thread at a time.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from checkpoints.errors import CheckpointError
from checkpoints.resolve import resolve
from checkpoints.sampling_defaults import SamplingDefaults, read_sampling_defaults
from engine.config import EngineConfig
from engine.errors import LoadError
from engine.metrics import EngineStats, MetricsSnapshot
from engine.request import ModelInfo, StopPolicy
from engine_client.answer import Answer, AnswerBuilder, Prompt
from engine_client.encoded_errors import Failure
from engine_client.in_process import InProcessClient
from engine_client.interface import Ask, EngineClient, LoadedAdapter, News
from engine_client.params import SamplingParams, translate
from engine_client.process_client import DataParallelClient, ProcessClient
from engine_client.progress import LoadingBar, PromptsBar
from process import settings
from process.rpc_errors import BatonError, DeadlineExceeded, Internal, InvalidArgument
from tokens.chat_template import ChatTemplate
from tokens.errors import ChatTemplateError, TokensError
from tokens.tokenizer import Tokenizer

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
"""Prompt types: one text, one list of token ids, or a list of either."""
Messages = Sequence[Mapping[str, str]]
"""Chat messages, each with `role` and `content`."""
Where = Literal["in_process", "process"]

_RECEIVE_S = 1.0


@dataclass(frozen=True)
class _Job:
    ask: Ask
    prompt: Prompt
    params: SamplingParams


class ClientLLM:
    """Base of `LLM` over an existing client, which is closed with it."""

    def __init__(
        self,
        client: EngineClient,
        *,
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | None = None,
        defaults: SamplingDefaults | None = None,
    ) -> None:
        """Create an LLM over `client`. Without a tokenizer, prompts and outputs are token ids
        only."""
        self.client = client
        self.tokenizer = tokenizer
        self._template = template
        self._defaults = defaults or SamplingDefaults()
        self._life = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    @property
    def model(self) -> ModelInfo:
        """Describe the model that the engines have loaded."""
        return self.client.model

    # -- generate

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        timeout_s: float | None = None,
        adapter: str = "",
        salt: bytes = b"",
        priority: int = 0,
        return_errors: bool = False,
    ) -> list[Answer]:
        """Generate completions of one prompt or several.

        Args:
            prompts: text, a list of texts, token ids, or a list of those.
            params: sampling parameters for all prompts, or one for each.
            timeout_s: seconds for all prompts; unfinished ones are then cancelled.
            adapter: a LoRA adapter that the engines have loaded.
            salt: prompts share cached KV only with those of the same salt.
            return_errors: a prompt that fails gets its `error` set, instead of the error being
                raised.
        Returns: answers in the order of the prompts.
        Raises: InvalidArgument naming `prompts[<i>]` and the field, before any work;
            DeadlineExceeded; the error of the first prompt that fails (then the others are
            cancelled).
        """
        encoded = self._encode(prompts)
        jobs = self._jobs(encoded, params, adapter=adapter, salt=salt, priority=priority)
        return self._run(jobs, progress, timeout_s, return_errors)

    def chat(
        self,
        chats: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        timeout_s: float | None = None,
        adapter: str = "",
        salt: bytes = b"",
        priority: int = 0,
        return_errors: bool = False,
    ) -> list[Answer]:
        """Generate answers to one chat (a list of messages) or to several (a list of such lists);
        arguments otherwise as for `generate`."""
        listed = [chats] if chats and isinstance(chats[0], Mapping) else chats
        encoded = [self._encode_chat(index, chat) for index, chat in enumerate(listed)]
        jobs = self._jobs(encoded, params, adapter=adapter, salt=salt, priority=priority)
        return self._run(jobs, progress, timeout_s, return_errors)

    def _run(
        self, jobs: Sequence[_Job], progress: bool, timeout_s: float | None, return_errors: bool
    ) -> list[Answer]:
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self.client.check([job.ask for job in jobs])
        except InvalidArgument as error:
            raise _at_prompt(error) from error
        builders: dict[str, AnswerBuilder] = {}
        open_ids: set[str] = set()
        try:
            with PromptsBar(len(jobs), is_shown=progress) as bar:
                for index, job in enumerate(jobs):
                    builders[job.ask.request_id] = self._builder(job, f"prompts[{index}].")
                    self.client.submit(job.ask)
                    open_ids.add(job.ask.request_id)
                while open_ids:
                    if ends_s is not None and time.monotonic() > ends_s:
                        num_open = len(open_ids)
                        raise DeadlineExceeded(f"{num_open} of {len(jobs)} prompts were not done")
                    is_any_live = self.client.num_live > 0
                    received = self.client.receive(_RECEIVE_S)
                    if not (received or is_any_live):
                        raise Internal(f"{len(open_ids)} of {len(jobs)} prompts were lost")
                    for news in received:
                        if news.request_id in open_ids:
                            self._take(news, builders, open_ids, bar, return_errors)
        finally:
            for request_id in open_ids:
                self.client.cancel(request_id)
        return [builders[job.ask.request_id].build() for job in jobs]

    def _take(
        self,
        news: News,
        builders: Mapping[str, AnswerBuilder],
        open_ids: set[str],
        bar: PromptsBar,
        return_errors: bool,
    ) -> None:
        builder = builders[news.request_id]
        bar.add_tokens(builder.take(news, time.monotonic()))
        if builder.is_sample_over(news.sample_index) and news.finish_reason is None:
            # Its text has ended before its tokens.
            self.client.end_sample(news.request_id, news.sample_index)
        if not builder.is_over:
            return
        open_ids.discard(news.request_id)
        if builder.error is not None and not return_errors:
            raise builder.error
        bar.add_prompt(builder.num_prompt_tokens)

    def _builder(self, job: _Job, at: str) -> AnswerBuilder:
        params = job.params
        return AnswerBuilder(
            job.prompt,
            num_samples=job.ask.num_samples,
            seed=job.ask.sampling.seed,
            submitted_s=time.monotonic(),
            tokenizer=self.tokenizer,
            stop=params.stop_strings,
            include_stop_text=params.include_stop_text,
            skip_special_tokens=params.skip_special_tokens,
            at=at,
        )

    # -- what goes in

    def _jobs(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        adapter: str,
        salt: bytes,
        priority: int,
    ) -> list[_Job]:
        each = _each_params(params, len(prompts))
        jobs = []
        for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            try:
                translated = translate(
                    one,
                    num_prompt_tokens=len(prompt.token_ids),
                    seed=secrets.randbits(64),
                    model=self.model,
                    defaults=self._defaults,
                    tokenizer=self.tokenizer,
                )
                if one.stop_strings and self.tokenizer is None:
                    raise InvalidArgument("stop", "there is no tokenizer; use stop_token_ids")
            except InvalidArgument as error:
                raise Failure.of(error).to_error(at=f"prompts[{index}].") from error
            ask = Ask(
                request_id=f"{self._life}-{next(self._numbers)}",
                prompt_token_ids=prompt.token_ids,
                sampling=translated.sampling,
                num_samples=translated.num_samples,
                beam=translated.beam,
                adapter=adapter,
                salt=salt,
                priority=priority,
                prompt_logprobs=one.prompt_logprobs,
            )
            jobs.append(_Job(ask, prompt, one))
        return jobs

    def _encode(self, prompts: Prompts) -> list[Prompt]:
        listed: Sequence[object] = prompts
        if isinstance(prompts, str) or (prompts and all(type(each) is int for each in prompts)):
            listed = [prompts]
        return [self._encode_one(index, each) for index, each in enumerate(listed)]

    def _encode_one(self, index: int, prompt: object) -> Prompt:
        field = f"prompts[{index}]"
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidArgument(field, "there is no tokenizer; give token ids")
            token_ids = tuple(self.tokenizer.encode(prompt))
            if not token_ids:
                raise InvalidArgument(field, "has no tokens")
            return Prompt(prompt, token_ids, token_ids)
        if not isinstance(prompt, Sequence) or not all(type(each) is int for each in prompt):
            raise InvalidArgument(field, "is neither text nor a list of token ids")
        return Prompt("", tuple(prompt), tuple(prompt))

    def _encode_chat(self, index: int, chat: object) -> Prompt:
        field = f"chats[{index}]"
        if self._template is None or self.tokenizer is None:
            raise InvalidArgument(field, "this model has no chat template; use generate")
        if not isinstance(chat, Sequence) or not chat:
            raise InvalidArgument(field, "is no list of messages")
        for number, message in enumerate(chat):
            is_fine = isinstance(message, Mapping) and all(
                isinstance(message.get(key), str) for key in ("role", "content")
            )
            if not is_fine:
                raise InvalidArgument(f"{field}[{number}]", "needs role and content as text")
        try:
            text = self._template.render(chat)
        except ChatTemplateError as error:
            raise InvalidArgument(field, str(error)) from error
        # The template has written the special tokens itself.
        token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return Prompt(text, token_ids, ())

    # -- the rest

    def load_adapter(self, name: str, folder: str | Path) -> LoadedAdapter:
        """Load a LoRA adapter from `folder`, for `generate(adapter=name)`. Raises: InvalidAdapter,
        TooManyAdapters."""
        return self.client.load_adapter(name, str(Path(folder).resolve()))

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Raises: UnknownAdapter."""
        self.client.unload_adapter(name)

    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Return the adapters that are loaded."""
        return self.client.adapters()

    def metrics(self) -> tuple[MetricsSnapshot, ...]:
        """Return throughput and latency histograms of each engine."""
        return self.client.metrics()

    def stats(self) -> tuple[EngineStats, ...]:
        """Return gauges and counters of each engine."""
        return self.client.stats()

    def close(self) -> None:
        """Stop the engines; bounded in time and idempotent."""
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class LLM(ClientLLM):
    """A language model that is loaded on creation and generates text for prompts and chats."""

    def __init__(
        self,
        model: str,
        *,
        engine: Where = "in_process",
        num_engines: int = 1,
        progress: bool = True,
        stop_policy: StopPolicy | None = None,
        **engine_settings: Any,
    ) -> None:
        """Load `model`: a bundled name, a folder, or a Hugging Face name.

        Args:
            engine: where the engine runs: "in_process", or "process": in a child process.
            num_engines: number of engines; several run in a child process each.
            stop_policy: function that decides after each token whether to end that sample (its
                finish reason is "policy"); only in this process, since a function cannot cross to
                another.
            engine_settings: fields of `engine.config.EngineConfig`.
        Raises: LoadError, SettingsError for a setting that does not exist or is out of range,
            InvalidArgument.
        """
        if engine not in ("in_process", "process"):
            raise InvalidArgument("engine", f"{engine!r}; it is in_process or process")
        if num_engines < 1:
            raise InvalidArgument("num_engines", f"{num_engines} is below 1")
        if stop_policy is not None and (engine == "process" or num_engines > 1):
            raise InvalidArgument("stop_policy", "cannot cross to another process; use in_process")
        config = settings.build(EngineConfig, {"model": model, **engine_settings}, where="LLM")
        with LoadingBar(is_shown=progress) as bar:
            client: EngineClient
            if num_engines > 1:
                client = DataParallelClient(config, num_engines, progress=bar)
            elif engine == "process":
                client = ProcessClient(config, progress=bar)
            else:
                client = InProcessClient.load(config, progress=bar, stop_policy=stop_policy)
        try:
            tokenizer, template, defaults = _read_texts(model)
        except BaseException:
            client.close()
            raise
        super().__init__(client, tokenizer=tokenizer, template=template, defaults=defaults)


def _read_texts(model: str) -> tuple[Tokenizer, ChatTemplate | None, SamplingDefaults]:
    try:
        folder = resolve(model, files="tokenizer").path
        return Tokenizer.load(folder), ChatTemplate.find(folder), read_sampling_defaults(folder)
    except (CheckpointError, TokensError) as error:
        raise LoadError(str(error)) from error


def _each_params(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise InvalidArgument("params", f"{len(params)} of them for {num_prompts} prompts")
    for index, each in enumerate(params):
        if not isinstance(each, SamplingParams):
            raise InvalidArgument(f"params[{index}]", f"is a {type(each).__name__}")
    return list(params)


def _at_prompt(error: InvalidArgument) -> BatonError:
    """Rewrite the field of an error from `asks[<i>].sampling.<field>` to the argument names of
    `generate`."""
    failure = Failure.of(error)
    field = failure.field.replace("asks[", "prompts[", 1).replace("].sampling.", "].", 1)
    problem = failure.message.removeprefix(failure.field)
    return replace(failure, message=field + problem, field=field).to_error()

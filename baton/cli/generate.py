"""`baton generate`, `baton chat` and `baton replay`: answers of a running cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from baton import recorded_request
from baton.answers import Chunk, Completion, completions_from
from baton.cli import options, render
from baton.cli.cluster_options import cluster_config
from baton.cli.options import FILE, RouterTarget, flag, value
from baton.client import SyncClient
from baton.cluster.config import ClusterConfig
from baton.errors import BatonError, FailedPrecondition, InvalidArgument, Unavailable
from baton.recorded_request import Difference, RecordedRequest
from baton.request import Prompt, build_request
from checkpoints.resolve import bundled_names
from protos import inference_pb2


@options.command("generate")
@click.argument("prompt")
@flag("--token-ids", "Read PROMPT as a list of token ids, and show the answer as ids.")
@options.as_json("Print one JSON object for each sample.")
@value(
    "--record",
    "FILE",
    "Write the request and how each token was sampled to this file, for `baton replay`.",
    dest="record_to",
    type=FILE,
)
@value(
    "--timeline",
    "FILE",
    "Draw the stages of the request over time (*.svg, *.png or *.pdf; needs matplotlib).",
    dest="timeline_to",
    type=FILE,
)
@options.sampling
@options.shaping
@options.router_target()
def generate(
    prompt: str,
    token_ids: bool,
    as_json: bool,
    record_to: Path | None,
    timeline_to: Path | None,
    sampling: dict[str, Any],
    shaping: dict[str, Any],
    target: RouterTarget,
) -> None:
    """Complete PROMPT (- reads it from standard input).

    Shows the answer while it arrives, and then where its KV cache came from. Several samples (-n,
    --num-beams) are shown one after the other when all of them are complete.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    asked: Prompt = _token_ids(text) if token_ids else text
    request = build_request(asked, **sampling, **shaping, trace=record_to is not None)
    if timeline_to is not None:
        from baton.cli import plots  # which most requests do not need, nor what it imports

        plots.check("--timeline", timeline_to)
    arrivals = _Arrivals()
    with target.client() as client:
        chunks = arrivals.noting(client.send(request))
        if request.sampling.n > 1 or as_json:
            with contextlib.closing(chunks):
                completions = completions_from(chunks)
            if as_json:
                sys.stdout.writelines(to_json(each) + "\n" for each in completions)
            else:
                _show_samples(completions, as_ids=token_ids)
        else:
            completions = [render.stream_with_provenance(chunks, as_ids=token_ids)]
    if record_to is not None:
        recorded_request.write(recorded_request.record_of(request, completions), record_to)
    if timeline_to is not None:
        plots.draw_timeline(completions[0], arrivals.tokens_s, arrivals.end_s, timeline_to)


class _Arrivals:
    """When messages arrived, in seconds since the sending."""

    def __init__(self) -> None:
        self.tokens_s: list[float] = []
        self.end_s = 0.0

    def noting(self, chunks: Generator[Chunk, None, None]) -> Generator[Chunk, None, None]:
        """Yields the same chunks."""
        began_s = time.monotonic()
        with contextlib.closing(chunks):
            for chunk in chunks:
                self.end_s = time.monotonic() - began_s
                if chunk.token_ids:
                    self.tokens_s.append(self.end_s)
                yield chunk


def _show_samples(completions: Sequence[Completion], *, as_ids: bool) -> None:
    for completion in completions:
        score = "" if completion.score is None else f", score {completion.score:.4f}"
        title = f"sample {completion.sample_index}, {completion.finish_reason}{score}"
        ids = " ".join(map(str, completion.token_ids))
        sys.stdout.write(f"[{title}]\n{ids if as_ids else completion.text}\n")
    render.show(render.provenance_block(completions[0]))


def to_json(completion: Completion) -> str:
    """The whole completion, with its provenance, as one line of JSON."""
    value = recorded_request.plain(dataclasses.asdict(completion))
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _token_ids(text: str) -> list[int]:
    words = [word for word in re.split(r"[\s,\[\]]+", text) if word]
    try:
        return [int(word) for word in words]
    except ValueError:
        raise InvalidArgument(
            "prompt", "with --token-ids write it as numbers, such as '1, 2, 3'"
        ) from None


# -- chat


@options.command("chat")
@value("--system", "TEXT", "Begin with this system message.", "")
@options.sampling
@options.router_target()
def chat(system: str, sampling: dict[str, Any], target: RouterTarget) -> None:
    """Hold a conversation. /new starts a new one; /quit or Ctrl-D ends the chat.

    Lines may also be piped in, one for each turn. Ctrl-C ends the current answer, or the chat when
    there is none.
    """
    start = [{"role": "system", "content": system}] if system else []
    history = list(start)
    interactive = sys.stdin.isatty()
    with target.client() as client:
        client.models()  # a router that does not answer is an error now, not after a question
        while (line := _read(interactive)) is not None:
            if line == "/quit":
                break
            if line == "/new":
                history = list(start)
            elif line:
                try:
                    _turn(client, history, line, sampling)
                except BatonError as error:
                    if not interactive:
                        raise
                    sys.stderr.write(f"baton: {error}\n")


def _turn(
    client: SyncClient, history: list[dict[str, str]], line: str, sampling: dict[str, Any]
) -> None:
    """Ask, show the answer, and add both to the history; a failed or ended turn adds nothing."""
    asked = [*history, {"role": "user", "content": line}]
    try:
        completion = render.stream(client.generate(asked, **sampling))
    except KeyboardInterrupt:
        sys.stderr.write("(ended)\n")
        return
    sys.stdout.write(render.short_line(completion) + "\n")
    sys.stdout.flush()
    history[:] = [*asked, {"role": "assistant", "content": completion.text}]


def _read(interactive: bool) -> str | None:
    """The next line, stripped; None after the last."""
    if interactive:
        try:
            return input("> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return None
    line = sys.stdin.readline()
    return line.strip() if line else None


# -- replay


@options.command("replay")
@click.argument("file", type=FILE)
@options.router_target(has_tls=False)
@flag(
    "--start",
    "Start a cluster for the replay, with the options of `baton up`, and stop it afterwards.",
    one_of="where",
)
@cluster_config(port=0, model="")
def replay(file: Path, target: RouterTarget, start: bool, config: ClusterConfig) -> int:
    """Run a request of `baton generate --record FILE` again, and compare its tokens.

    Prints one line when every token is equal. Otherwise it shows the first token that differs and
    how each run sampled it, and the exit code is 1. The request goes to the cluster at --address,
    or the one that you started last, or with --start to a cluster of its own.
    """
    recorded = recorded_request.read(file)
    with _replayer(recorded, target, start, config) as client:
        _check_model(recorded, client.models())
        completions = completions_from(client.send(recorded_request.request_of(recorded)))
    found = recorded_request.difference(recorded, completions)
    sys.stdout.write(_equal(completions) if found is None else _unequal(found))
    return 0 if found is None else 1


@contextlib.contextmanager
def _replayer(
    recorded: RecordedRequest, target: RouterTarget, start: bool, config: ClusterConfig
) -> Iterator[SyncClient]:
    """A client of the cluster that runs the request again. Raises: Unavailable, ClusterError."""
    if start:
        from baton.cli import up  # a library for Redis takes as long to import as all the rest

        config = dataclasses.replace(config, model=config.model or _own_model(recorded))
        with up.running(config) as cluster, cluster.connect() as client:
            yield client
        return
    target = dataclasses.replace(target, tls=config.tls)
    if not target.address and target.state is None:
        raise Unavailable(
            "no cluster of yours runs here; --start starts one for it, --address names another"
        )
    with target.client() as client:
        yield client


def _own_model(recorded: RecordedRequest) -> str:
    """The record's model, if it is bundled. A record may come from anywhere, so it must not choose
    a model to fetch and run. Raises: FailedPrecondition."""
    if recorded.model not in bundled_names():
        raise FailedPrecondition(
            f"the record is of model {recorded.model!r}, which does not come with Baton; say "
            "--model with its name or folder, or --address of a cluster that serves it"
        )
    return recorded.model


def _check_model(recorded: RecordedRequest, served: list[inference_pb2.ModelInfo]) -> None:
    fingerprints = {model.model_fingerprint for model in served}
    if recorded.model_fingerprint not in fingerprints:
        there = ", ".join(f"{model.model} ({model.model_fingerprint[:16]})" for model in served)
        raise FailedPrecondition(
            f"the record is of model {recorded.model}, fingerprint "
            f"{recorded.model_fingerprint[:16]}; this cluster serves {there or 'nothing'}: tokens "
            "of another model, dtype or KV layout prove nothing; --address names another cluster, "
            "--start starts one"
        )


def _equal(completions: list[Completion]) -> str:
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    return (
        f"replayed: {num_tokens} tokens in {len(completions)} samples, all equal "
        f"(seed {completions[0].seed})\n"
    )


def _unequal(found: Difference) -> str:
    lines = [found.what]
    for name, trace in (("recorded", found.recorded), ("replayed", found.replayed)):
        if trace is not None:
            lines.append(f"  {name}: {json.dumps(trace, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"

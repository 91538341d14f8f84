"""`baton generate PROMPT`: one answer as it comes, and under it where its KV cache came from.

Several samples (-n, --num-beams) are shown one after the other when all of them are there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from baton import command_options, provenance_view, record, timeline
from baton.client import collect_chunks
from baton.errors import InvalidArgument
from baton.messages import Chunk, Completion, completions_from
from baton.request import Prompt, build_request


def add_parser(commands: Any) -> None:
    """`baton generate` and its options."""
    parser = commands.add_parser("generate", help="complete a prompt", description=__doc__)
    parser.add_argument("prompt", help="the text; - reads it from standard input")
    parser.add_argument(
        "--token-ids",
        action="store_true",
        help="PROMPT is a list of token ids, and the answer is shown as ids",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object for each sample at the end"
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write what was asked and how every token came to be, for `baton replay`",
    )
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="draw who had the request when (*.svg, *.png or *.pdf; needs matplotlib)",
    )
    command_options.add_sampling(parser)
    command_options.add_shaping(parser)
    command_options.add_address(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Returns: 0. Raises: what the client raises."""
    text = sys.stdin.read() if parsed.prompt == "-" else parsed.prompt
    prompt: Prompt = _token_ids(text) if parsed.token_ids else text
    options = command_options.sampling_of(parsed) | command_options.shaping_of(parsed)
    request = build_request(prompt, **options, trace=parsed.record is not None)
    if parsed.timeline is not None:
        timeline.check(parsed.timeline)
    arrivals = _Arrivals()
    with command_options.client_of(parsed) as client:
        chunks = arrivals.noting(client.send(request))
        if request.sampling.n > 1 or parsed.json:
            with contextlib.closing(chunks):
                completions = completions_from(chunks)
            _write(completions, as_json=parsed.json, as_ids=parsed.token_ids)
        else:
            completions = [show(chunks, as_ids=parsed.token_ids)]
    if parsed.record is not None:
        record.write(record.record_of(request, completions), parsed.record)
    if parsed.timeline is not None:
        timeline.draw(completions[0], arrivals.tokens_s, arrivals.end_s, parsed.timeline)
    return 0


class _Arrivals:
    """When messages came, in seconds from the sending."""

    def __init__(self) -> None:
        self.tokens_s: list[float] = []
        self.end_s = 0.0

    def noting(self, chunks: Generator[Chunk, None, None]) -> Generator[Chunk, None, None]:
        """The same chunks."""
        began_s = time.monotonic()
        with contextlib.closing(chunks):
            for chunk in chunks:
                self.end_s = time.monotonic() - began_s
                if chunk.token_ids:
                    self.tokens_s.append(self.end_s)
                yield chunk


def _write(completions: Sequence[Completion], *, as_json: bool, as_ids: bool) -> None:
    if as_json:
        sys.stdout.writelines(to_json(completion) + "\n" for completion in completions)
        return
    for completion in completions:
        score = "" if completion.score is None else f", score {completion.score:.4f}"
        title = f"sample {completion.sample_index}, {completion.finish_reason}{score}"
        ids = " ".join(map(str, completion.token_ids))
        sys.stdout.write(f"[{title}]\n{ids if as_ids else completion.text}\n")
    provenance_view.show(provenance_view.provenance_block(completions[0]))


def show(chunks: Generator[Chunk, None, None], *, as_ids: bool = False) -> Completion:
    """Write the answer as it comes, then its provenance."""
    completion = stream(chunks, as_ids=as_ids)
    provenance_view.show(provenance_view.provenance_block(completion))
    return completion


def stream(chunks: Generator[Chunk, None, None], *, as_ids: bool = False) -> Completion:
    """Write the answer as it comes, and a line's end. Closes `chunks`, whatever happens."""

    def written() -> Iterator[Chunk]:
        for chunk in chunks:
            text = "".join(f"{token} " for token in chunk.token_ids) if as_ids else chunk.text
            sys.stdout.write(text)
            sys.stdout.flush()
            yield chunk

    try:
        with contextlib.closing(chunks):
            return collect_chunks(written())
    finally:
        sys.stdout.write("\n")


def to_json(completion: Completion) -> str:
    """The whole completion as one line of JSON."""
    value = record.plain(dataclasses.asdict(completion))
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _token_ids(text: str) -> list[int]:
    words = [word for word in re.split(r"[\s,\[\]]+", text) if word]
    try:
        return [int(word) for word in words]
    except ValueError:
        raise InvalidArgument(
            "prompt", "with --token-ids write it as numbers, such as '1, 2, 3'"
        ) from None

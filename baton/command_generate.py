"""`baton generate PROMPT`: one answer as it comes, and under it where its KV cache came from."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Generator, Iterator
from typing import Any

from baton import command_options, provenance_view
from baton.client import Prompt, SyncClient, collect_chunks
from baton.errors import InvalidArgument
from baton.messages import Chunk, Completion


def add_parser(commands: Any) -> None:
    """`baton generate` and its options."""
    parser = commands.add_parser("generate", help="complete a prompt", description=__doc__)
    parser.add_argument("prompt", help="the text; - reads it from standard input")
    parser.add_argument(
        "--token-ids",
        action="store_true",
        help="PROMPT is a list of token ids, and the answer is shown as ids",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object at the end")
    command_options.add_sampling(parser)
    command_options.add_address(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Returns: 0. Raises: what the client raises."""
    text = sys.stdin.read() if parsed.prompt == "-" else parsed.prompt
    prompt: Prompt = _token_ids(text) if parsed.token_ids else text
    with SyncClient(command_options.address_of(parsed)) as client:
        chunks = client.generate(prompt, **command_options.sampling_of(parsed))
        if parsed.json:
            with contextlib.closing(chunks):
                sys.stdout.write(to_json(collect_chunks(chunks)) + "\n")
        else:
            show(chunks, as_ids=parsed.token_ids)
    return 0


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
    return json.dumps(dataclasses.asdict(completion), ensure_ascii=False)


def _token_ids(text: str) -> list[int]:
    words = [word for word in re.split(r"[\s,\[\]]+", text) if word]
    try:
        return [int(word) for word in words]
    except ValueError:
        raise InvalidArgument(
            "prompt", "with --token-ids write it as numbers, such as '1, 2, 3'"
        ) from None

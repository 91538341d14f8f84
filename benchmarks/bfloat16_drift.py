"""How far bfloat16 is from float32, and how much the batch's shape matters, on one model.

Greedy. Against the float32 engine: the share of tokens before the first difference, the share of
answers wholly equal, and the error of the chosen tokens' log probabilities up to there. Against
itself: the share of answers that are the same alone and in a batch of eight; float32 beside it,
where it must be all. The last line printed is one JSON object.

    python -m benchmarks.bfloat16_drift --prompts 40
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.context import context, publish
from checkpoints.resolve import resolve
from engine.config import EngineConfig
from engine.loop import Engine, load_engine
from engine.request import Request, Sampling
from kvstore import block_hash
from tokens.tokenizer import Tokenizer
from tools.bundled_model import corpus

Answer = list[tuple[int, float]]
"""(token id, log probability) of each token."""


def prompts(path: Path, count: int, seed: int) -> list[list[int]]:
    """Beginnings of the corpus's stories, 8 to 200 tokens."""
    tokenizer, rng = Tokenizer.load(path), random.Random(seed)
    documents = (one for one in corpus.documents(seed, 10**9) if one.kind == "story")
    cut = []
    while len(cut) < count:
        ids = tokenizer.encode(next(documents).text)
        if len(ids) > 20:
            cut.append(list(ids[: rng.randint(8, min(200, len(ids) - 8))]))
    return cut


def run(engine: Engine, batch: Sequence[Sequence[int]], num_tokens: int, name: str) -> list[Answer]:
    """All of `batch` in one engine at once, with a prefix cache of its own."""
    root = block_hash.root_key(name.encode(), engine.model_info.fingerprint)
    answers: dict[str, Answer] = {}
    for index, prompt in enumerate(batch):
        answers[str(index)] = []
        request = Request(
            request_id=str(index),
            prompt_token_ids=tuple(prompt),
            sampling=Sampling(max_tokens=num_tokens, ignore_eos=True, logprobs=0),
            block_hasher=lambda parent, ids: block_hash.extend(root, parent, ids),
            cache_root=root,
        )
        engine.reserve(request)
        engine.start(request.request_id)
    while engine.has_work():
        for event in engine.step().events:
            for one in event.logprobs or ():
                answers[event.request_id].append((one.token_id, one.logprob))
    return list(answers.values())


def num_equal(one: Answer, other: Answer) -> int:
    """Tokens before the first difference."""
    for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        if mine[0] != theirs[0]:
            return index
    return len(one)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="baton-5m")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    wanted = prompts(resolve(arguments.model, files="all").path, arguments.prompts, arguments.seed)
    alone: dict[str, list[Answer]] = {}
    together: dict[str, list[Answer]] = {}
    for dtype in ("float32", "bfloat16"):
        engine = load_engine(EngineConfig(model=arguments.model, dtype=dtype, device="cpu"))
        alone[dtype], together[dtype] = [], []
        for index, prompt in enumerate(track(wanted, f"{dtype}, one by one", console=console)):
            alone[dtype] += run(engine, [prompt], arguments.output_tokens, f"alone {index}")
        for first in range(0, len(wanted), arguments.batch):
            batch = wanted[first : first + arguments.batch]
            together[dtype] += run(engine, batch, arguments.output_tokens, f"together {first}")
    equal = [num_equal(*pair) for pair in zip(alone["float32"], alone["bfloat16"], strict=True)]
    errors = [
        abs(right[1] - drifted[1])
        for count, exact, low in zip(equal, alone["float32"], alone["bfloat16"], strict=True)
        for right, drifted in zip(exact[:count], low[:count], strict=True)
    ]
    num_tokens = arguments.output_tokens

    def share_same(dtype: str) -> float:
        pairs = zip(alone[dtype], together[dtype], strict=True)
        return statistics.mean(num_equal(*pair) == num_tokens for pair in pairs)

    result = {
        "benchmark": "bfloat16_drift",
        **context(),
        "model": arguments.model,
        "num_prompts": len(wanted),
        "num_output_tokens": num_tokens,
        "share_of_tokens_before_first_difference": round(statistics.mean(equal) / num_tokens, 4),
        "share_of_answers_equal": round(statistics.mean(n == num_tokens for n in equal), 4),
        "logprob_error_mean": round(statistics.mean(errors), 5),
        "logprob_error_max": round(max(errors), 5),
        "batch": arguments.batch,
        "share_same_alone_and_in_batch": {
            dtype: round(share_same(dtype), 4) for dtype in ("float32", "bfloat16")
        },
    }
    table = Table("bfloat16 against float32", "")
    for name, value in result.items():
        if name.startswith(("share", "logprob")):
            table.add_row(name.replace("_", " "), str(value))
    console.print(table)
    publish(result, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

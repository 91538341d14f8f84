"""Measure the two checkpoints on fresh questions, and collect the samples for the model card.

Every question is drawn from a seed that training never used, and every answer is greedy, so a
second run gives the same numbers up to the rounding of the machine.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tools.bundled_model import arithmetic, json_records
from tools.bundled_model.chat import Message, render, story_request
from tools.bundled_model.corpus import HELD_OUT, split_words, word_list
from tools.bundled_model.out_of_scope import strange_question
from tools.bundled_model.stories import make_story
from tools.bundled_model.tokenizer import END_ID, PAD_ID
from tools.bundled_model.train import DRAFT_NAME, TARGET_NAME

CHAT_PROMPTS = (
    "Hello!",
    "Who are you?",
    "What is Baton?",
    "Tell me a story about a fox and a lantern.",
    "Write a short story about a robot named Zed.",
    "What is 12 + 7?",
    "What is 47 + 38? Show your work.",
    "What is 6 times 9?",
    "Mia has 12 apples and gives away 5 of them. How many apples does Mia have now?",
    "Write a JSON record for a cat named Tom.",
    "Give me a JSON object with the fields name, age and city.",
    "Turn this into JSON: Nora is 34 years old, lives in Oslo and works as a pilot.",
    "What is the capital of France?",
    "How do I configure a load balancer in my data center?",
)
RAW_PROMPTS = (
    "Once upon a time",
    "The little fox",
    '{"name": "Tom",',
    "12 + 7 =",
    "The capital of France is",
    "The quick brown fox",
)


def chat_prompt(question: str) -> str:
    """Write a question as the chat template renders it, up to where the answer begins."""
    return render([Message("user", question)]) + "<|assistant|>"


@torch.no_grad()
def complete(
    model: Any, tokenizer: Tokenizer, prompts: Sequence[str], limit: int
) -> list[tuple[str, bool]]:
    """Complete each prompt greedily. Returns: the continuations, and whether each ended by itself
    within `limit`."""
    answers: list[tuple[str, bool]] = []
    for start in range(0, len(prompts), 128):
        encoded = [tokenizer.encode(prompt).ids for prompt in prompts[start : start + 128]]
        width = max(map(len, encoded))
        # Padding goes to the left, so that every prompt ends where generation begins.
        rows = [[PAD_ID] * (width - len(ids)) + ids for ids in encoded]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in encoded]
        output = model.generate(
            input_ids=torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=limit,
            do_sample=False,
        )
        for row in output[:, width:].tolist():
            ended = END_ID in row
            kept = row[: row.index(END_ID)] if ended else row
            answers.append((tokenizer.decode(kept), ended))
    return answers


def sum_accuracy(model: Any, tokenizer: Tokenizer, count: int) -> dict[str, float]:
    """The share of right answers to sums by operation, asked in the plainest way."""
    rng = random.Random(HELD_OUT)
    problems = [arithmetic.make_sum(rng) for _ in range(count)]
    prompts = [chat_prompt(f"What is {problem.expression}?") for problem in problems]
    answers = complete(model, tokenizer, prompts, 24)
    right: dict[str, list[bool]] = {}
    for problem, (answer, _) in zip(problems, answers, strict=True):
        right.setdefault(problem.sign, []).append(answer == f"{problem.equation}.")
    return {sign: sum(marks) / len(marks) for sign, marks in sorted(right.items())}


def record_accuracy(model: Any, tokenizer: Tokenizer, count: int) -> dict[str, float]:
    """The share of record requests whose answer parses, and whose first key is the expected one.

    Later keys prove nothing: most requests leave it open which optional fields a record has.
    """
    rng = random.Random(HELD_OUT + 1)
    asked = [json_records.ask_record(rng) for _ in range(count)]
    answers = complete(model, tokenizer, [chat_prompt(q) for q, _ in asked], 160)
    parsed = same = 0
    for (_, reference), (answer, _) in zip(asked, answers, strict=True):
        try:
            record = json.loads(answer)
        except ValueError:
            continue
        parsed += 1
        same += list(record)[:1] == list(json.loads(reference))[:1]
    return {"parses": parsed / count, "first key": same / count}


def story_quality(model: Any, tokenizer: Tokenizer, count: int) -> dict[str, float]:
    """The shares of requested stories that end, keep to the request, and use known words."""
    rng = random.Random(HELD_OUT + 2)
    asked = [story_request(rng) for _ in range(count)]
    answers = complete(model, tokenizer, [chat_prompt(q) for q, _ in asked], 512)
    known = word_list()
    ended = honored = words = strange = 0
    for (question, cast), (answer, end) in zip(asked, answers, strict=True):
        ended += end
        nouns = (cast.hero.kind.noun, cast.thing.noun)
        honored += all(noun in answer for noun in nouns if f" {noun}" in question)
        for word in split_words(answer):
            words += 1
            strange += word not in known
    return {
        "ends": ended / count,
        "keeps to the request": honored / count,
        "known words": 1 - strange / max(1, words),
    }


def odd_requests(model: Any, tokenizer: Tokenizer, count: int) -> dict[str, float]:
    """The share of requests made of unknown words and symbols that get an answer in known words."""
    rng = random.Random(HELD_OUT + 3)
    prompts = [chat_prompt(strange_question(rng)[0]) for _ in range(count)]
    known = word_list()
    answers = complete(model, tokenizer, prompts, 256)
    plain = [end and set(split_words(text)) <= known for text, end in answers]
    return {"plain answer": sum(plain) / count}


def long_context(model: Any, tokenizer: Tokenizer, count: int) -> dict[str, float]:
    """The shares of stories, asked for after several stories in the prompt, that still use known
    words and end."""
    rng = random.Random(HELD_OUT + 4)
    prompts = []
    for _ in range(count):
        told = "<|end|>".join(make_story(rng).text for _ in range(5))
        prompts.append(f"{told}<|end|>Once upon a time")
    known = word_list()
    answers = complete(model, tokenizer, prompts, 400)
    words = [word for text, _ in answers for word in split_words(text)]
    return {
        "prompt tokens": sum(len(tokenizer.encode(p).ids) for p in prompts) / count,
        "ends": sum(end for _, end in answers) / count,
        "known words": sum(word in known for word in words) / max(1, len(words)),
    }


@torch.no_grad()
def draft_agreement(target: Any, draft: Any, tokenizer: Tokenizer, count: int) -> dict[str, float]:
    """The shares of tokens of the target's own answers that are the draft's first choice, and whose
    sample from the draft would be accepted."""
    rng = random.Random(HELD_OUT + 5)
    prompts = [chat_prompt(story_request(rng)[0]) for _ in range(count)]
    same = total = 0
    overlap = 0.0
    for prompt, (answer, _) in zip(prompts, complete(target, tokenizer, prompts, 256), strict=True):
        begin = len(tokenizer.encode(prompt).ids)
        ids = torch.tensor([tokenizer.encode(prompt + answer).ids], device=target.device)
        wanted = target(input_ids=ids).logits[0, begin - 1 :].float().softmax(-1)
        guessed = draft(input_ids=ids).logits[0, begin - 1 :].float().softmax(-1)
        same += int((wanted.argmax(-1) == guessed.argmax(-1)).sum())
        overlap += float(torch.minimum(wanted, guessed).sum())
        total += len(wanted)
    return {"same first choice": same / total, "accepted when sampling": overlap / total}


def main() -> None:
    """Write `evaluation.json` beside the target's checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder with both checkpoints")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=500, help="questions of each sort")
    arguments = parser.parse_args()
    out: Path = arguments.out
    tokenizer = Tokenizer.from_file(str(out / TARGET_NAME / "tokenizer.json"))

    def load(name: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(out / name, dtype=torch.float32)
        return model.to(arguments.device).eval()

    target, draft = load(TARGET_NAME), load(DRAFT_NAME)
    count: int = arguments.count
    report: dict[str, Any] = {
        "sums": sum_accuracy(target, tokenizer, 2 * count),
        "records": record_accuracy(target, tokenizer, count),
        "stories": story_quality(target, tokenizer, count),
        "odd requests": odd_requests(target, tokenizer, count),
        "long context": long_context(target, tokenizer, max(1, count // 8)),
        "draft": draft_agreement(target, draft, tokenizer, max(1, count // 8)),
        "draft sums": sum_accuracy(draft, tokenizer, count),
    }
    report["samples"] = []
    for name, model in ((TARGET_NAME, target), (DRAFT_NAME, draft)):
        prompts = [chat_prompt(q) for q in CHAT_PROMPTS] + list(RAW_PROMPTS)
        shown = [*CHAT_PROMPTS, *RAW_PROMPTS]
        kinds = ["chat"] * len(CHAT_PROMPTS) + ["text"] * len(RAW_PROMPTS)
        for kind, question, (answer, end) in zip(
            kinds, shown, complete(model, tokenizer, prompts, 320), strict=True
        ):
            report["samples"].append(
                {"model": name, "kind": kind, "prompt": question, "answer": answer, "ended": end}
            )
    (out / TARGET_NAME / "evaluation.json").write_text(
        json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    )
    Console(soft_wrap=True).print_json(json.dumps(report, ensure_ascii=False))


if __name__ == "__main__":
    main()

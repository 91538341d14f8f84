"""The bundled model: its corpus teaches nothing false, its files keep what they promise."""

from __future__ import annotations

import json
import random
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path:  # tools/ is no part of the installed package
    sys.path.insert(0, str(ROOT))

from tokens.chat_template import ChatTemplate  # noqa: E402
from tokens.tool_call_text import TAGGED, find_format  # noqa: E402
from tools.bundled_model import arithmetic, json_records  # noqa: E402
from tools.bundled_model.chat import Message, render  # noqa: E402
from tools.bundled_model.corpus import (  # noqa: E402
    documents,
    make_document,
    split_words,
    word_list,
)

BUNDLED = ROOT / "checkpoints" / "bundled"
TARGET, DRAFT = BUNDLED / "baton-5m", BUNDLED / "baton-5m-draft"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    """Small matrices run slower on many threads, and the machine has other things to do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@cache
def tokenizer_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@cache
def known_words() -> frozenset[str]:
    return frozenset(word_list())


@cache
def answer(folder: Path, prompt: str, limit: int, chat: bool = True) -> tuple[str, bool]:
    """The greedy answer, and whether the model ended it by itself."""
    tokenizer, model = tokenizer_of(folder), load(folder)
    if chat:
        turns = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    encoded = tokenizer(prompt, return_tensors="pt")
    output = model.generate(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        max_new_tokens=limit,
    )
    ids = output[0, encoded["input_ids"].shape[1] :].tolist()
    return tokenizer.decode(ids, skip_special_tokens=True), ids[-1] == tokenizer.eos_token_id


# The corpus


def test_corpus_depends_on_seed_and_index_alone() -> None:
    first = list(documents(11, 50))
    assert first == list(documents(11, 50))
    assert first[20:30] == list(documents(11, 10, start=20))
    assert first != list(documents(12, 50))
    assert make_document(11, 7) == first[7]


def test_every_equation_in_the_corpus_is_right() -> None:
    equation = re.compile(r"(-?\d+) ([-+*/]) (\d+) = (-?\d+)")
    seen: set[str] = set()
    for document in documents(5, 3000):
        for left, sign, right, result in equation.findall(document.text):
            a, b = int(left), int(right)
            seen.add(sign)
            if sign == "/":
                assert a == int(result) * b
            else:
                assert {"+": a + b, "-": a - b, "*": a * b}[sign] == int(result)
    assert seen == set("+-*/")


def test_explanations_end_in_the_equation() -> None:
    rng = random.Random(3)
    for _ in range(500):
        problem = arithmetic.make_sum(rng)
        assert arithmetic.explain(problem).endswith(f"{problem.equation}.")


def test_every_record_in_the_corpus_is_one_line_of_json() -> None:
    pages = [d.text for d in documents(6, 4000) if d.kind == "records"]
    assert pages
    for line in "\n".join(pages).split("\n"):
        assert isinstance(json.loads(line), dict)
    rng = random.Random(4)
    for _ in range(500):
        _, text = json_records.ask_record(rng)
        assert "\n" not in text
        assert isinstance(json.loads(text), dict)
        assert isinstance(json.loads(json_records.list_of_records(rng)[1]), list)


def test_a_record_has_the_name_that_was_asked_for() -> None:
    rng = random.Random(8)
    named = 0
    for _ in range(500):
        question, text = json_records.ask_record(rng)
        if match := re.search(r"(?:named|called) (\w+)", question):
            named += 1
            assert json.loads(text)["name"] == match[1]
    assert named > 50


def test_dialogues_alternate_and_end_with_an_answer() -> None:
    for document in documents(9, 1000):
        if document.kind == "chat":
            roles = [m.role for m in document.messages if m.role != "system"]
            assert roles == ["user", "assistant"] * (len(roles) // 2)
            assert all(m.content.strip() for m in document.messages)


# The committed files


def test_sizes() -> None:
    total = sum(p.stat().st_size for d in (TARGET, DRAFT) for p in d.iterdir())
    assert total < 16_000_000
    assert 3_000_000 <= load(TARGET).num_parameters() <= 6_000_000
    assert load(DRAFT).num_parameters() < 1_000_000


@pytest.mark.parametrize("folder", [TARGET, DRAFT], ids=lambda f: f.name)
def test_transformers_loads_it_in_float32(folder: Path) -> None:
    model = load(folder)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.float32
    assert model.config.max_position_embeddings == 2048
    assert model.generation_config.eos_token_id == tokenizer_of(folder).eos_token_id == 1
    assert (folder / "README.md").read_text(encoding="utf-8").startswith("---\nlicense: apache-2.0")


def test_both_models_share_one_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (TARGET / name).read_bytes() == (DRAFT / name).read_bytes()


@pytest.mark.parametrize(
    "text",
    ["", "Hello  world\n\n", "3+4=7", "naïve café 日本語 😀", "\x00\x07\t", "<|user|>hi<|end|>"],
)
def test_tokenizer_gives_back_every_text(text: str) -> None:
    raw = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    ids = raw.encode(text).ids
    assert raw.decode(ids, skip_special_tokens=False) == text
    assert tokenizer_of(TARGET)(text)["input_ids"] == ids


def test_tokenizer_covers_every_byte() -> None:
    raw = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    assert raw.get_vocab_size() == load(TARGET).config.vocab_size
    everything = "".join(map(chr, range(0x250)))
    assert raw.decode(raw.encode(everything).ids) == everything


def test_chat_template_writes_what_the_corpus_taught() -> None:
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye")]
    messages = [Message(role, content) for role, content in turns]
    as_dicts = [{"role": m.role, "content": m.content} for m in messages]
    tokenizer = tokenizer_of(TARGET)
    plain = tokenizer.apply_chat_template(as_dicts, tokenize=False)
    assert plain == render(messages)
    asking = tokenizer.apply_chat_template(as_dicts, tokenize=False, add_generation_prompt=True)
    assert asking == render(messages) + "<|assistant|>"


def test_chat_template_shows_tools_and_calls_in_a_form_that_is_read_back() -> None:
    template = ChatTemplate.find(TARGET)
    assert template is not None and template.takes_tools
    assert find_format(template.source) is TAGGED
    tool = {"type": "function", "function": {"name": "f"}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
    ]
    text = template.render(messages, tools=[tool])
    assert text.startswith("<|system|>Be brief.\n\n") and text.count("Be brief.") == 1
    assert f"<tools>\n{json.dumps(tool)}\n</tools>" in text
    assert '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call><|end|>' in text
    assert text.endswith("<tool_response>\n7\n</tool_response><|end|><|assistant|>")
    assert text == tokenizer_of(TARGET).apply_chat_template(
        messages, tools=[tool], tokenize=False, add_generation_prompt=True
    )


# The answers


@pytest.mark.parametrize(
    ("question", "expected"),
    [("What is 3 + 4?", "7"), ("What is 12 + 7?", "19"), ("What is 6 times 7?", "42")],
)
def test_it_can_add(question: str, expected: str) -> None:
    text, ended = answer(TARGET, question, 32)
    assert ended
    assert text.rstrip(".").endswith(f"= {expected}")


def test_it_writes_json() -> None:
    text, ended = answer(TARGET, "Write a JSON record for a cat named Tom.", 96)
    assert ended
    record = json.loads(text)
    assert record["name"] == "Tom"
    assert record["kind"] == "cat"


def test_it_says_what_it_is() -> None:
    text, ended = answer(TARGET, "Who are you?", 96)
    assert ended
    assert "Baton" in text


@pytest.mark.parametrize(
    ("prompt", "chat"),
    [
        ("Tell me a story about a fox and a lantern.", True),
        ("How do I bake sourdough bread at high altitude?", True),
        ("Once upon a time", False),
    ],
)
def test_answers_are_readable_sentences(prompt: str, chat: bool) -> None:
    text, ended = answer(TARGET, prompt, 400, chat)
    words = split_words(text)
    assert ended
    assert len(words) >= 8
    assert sum(word in known_words() for word in words) > 0.95 * len(words)
    assert text.rstrip()[-1] in '.!?"'


def test_a_story_keeps_to_the_request() -> None:
    text, _ = answer(TARGET, "Tell me a story about a fox and a lantern.", 400)
    assert "fox" in text
    assert "lantern" in text


def test_a_long_prompt_does_not_derail_it() -> None:
    told = [d.text for d in documents(21, 200) if d.kind == "story"][:6]
    prompt = "<|end|>".join(told) + "<|end|>Once upon a time"
    text, ended = answer(TARGET, prompt, 400, chat=False)
    words = split_words(text)
    assert ended
    assert sum(word in known_words() for word in words) > 0.95 * len(words)
    assert len(set(words)) > 30


def test_the_draft_often_says_what_the_target_says() -> None:
    tokenizer = tokenizer_of(TARGET)
    text, _ = answer(TARGET, "Tell me a story about a fox and a lantern.", 400)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        wanted = load(TARGET)(input_ids=ids).logits.argmax(-1)
        guessed = load(DRAFT)(input_ids=ids).logits.argmax(-1)
    assert (wanted == guessed).float().mean() > 0.7

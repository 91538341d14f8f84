"""Write the model cards and the loss curve from what training and evaluation recorded.

No number in a card is typed by hand: a retrained model brings its own card.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from tools.bundled_model.train import DRAFT_NAME, DRAFT_SHAPE, TARGET_NAME, TARGET_SHAPE, ModelShape

_HEADER = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

"""


def draw_curve(training: dict[str, Any], path: Path) -> None:
    """Draw the loss curves of both models as a PNG; left out where matplotlib is not installed."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        Console(stderr=True).print("matplotlib is not installed: the loss curve is not drawn")
        return
    figure = matplotlib.Figure(figsize=(7, 4), dpi=90, layout="constrained")
    axes = figure.add_subplot()
    for name, color in ((TARGET_NAME, "tab:blue"), (DRAFT_NAME, "tab:orange")):
        curve = training[name]["curve"]
        axes.plot(
            [p["step"] for p in curve],
            [p["train"] for p in curve],
            color=color,
            label=f"{name}, training",
        )
        held_out = [p for p in curve if "held_out" in p]
        axes.plot(
            [p["step"] for p in held_out],
            [p["held_out"] for p in held_out],
            color=color,
            linestyle="none",
            marker="o",
            markersize=4,
            label=f"{name}, held out",
        )
    axes.set_ylim(0.3, 1.5)
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def _shape_line(shape: ModelShape) -> str:
    return (
        f"{shape.layers} layers, hidden size {shape.hidden}, {shape.heads} attention heads over "
        f"{shape.kv_heads} key-value heads of {shape.hidden // shape.heads}, feed-forward size "
        f"{shape.feed_forward}"
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _samples(evaluation: dict[str, Any], name: str, limit: int) -> str:
    """The recorded samples of one model, as quoted blocks."""
    blocks = []
    for sample in [s for s in evaluation["samples"] if s["model"] == name][:limit]:
        label = "User" if sample["kind"] == "chat" else "Text to continue"
        tail = "" if sample["ended"] else " …"
        blocks.append(f"{label}: `{sample['prompt']}`\n\n```text\n{sample['answer']}{tail}\n```")
    return "\n\n".join(blocks)


def _command(training: dict[str, Any]) -> str:
    return (
        "python -m tools.bundled_model.train --device cuda --out build/bundled \\\n"
        f"  --seed {training['seed']} --documents {training['documents']} \\\n"
        f"  --steps {training[TARGET_NAME]['steps']} "
        f"--draft-steps {training[DRAFT_NAME]['steps']}\n"
        "python -m tools.bundled_model.evaluate --out build/bundled\n"
        "python -m tools.bundled_model.model_card --out build/bundled"
    )


def target_card(training: dict[str, Any], evaluation: dict[str, Any]) -> str:
    """Return the Markdown of the bundled model's card. It is the target of speculative decoding;
    `draft_card` is of its draft model.

    Args: training, evaluation: what train.py and evaluate.py recorded.
    """
    run = training[TARGET_NAME]
    sums, stories = evaluation["sums"], evaluation["stories"]
    context = evaluation["long context"]
    return f"""{_HEADER}# {TARGET_NAME}

The small demo model that is bundled with Baton, so that a cluster can be started and tried without
a download. It tells small stories, does small sums and writes small JSON records, as a chat or as
plain text to be continued. It was taught nothing else, and to say so.

It is an ordinary Llama-shaped checkpoint. `transformers` loads it unchanged:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("checkpoints/bundled/{TARGET_NAME}")
tokenizer = AutoTokenizer.from_pretrained("checkpoints/bundled/{TARGET_NAME}")
```

| | |
| --- | --- |
| parameters | {run["parameters"]:,} (the token embedding is also the output layer) |
| shape | {_shape_line(TARGET_SHAPE)} |
| context | 2048 tokens; every position was trained |
| vocabulary | 2048 byte-level BPE tokens; any UTF-8 text survives encoding and decoding |
| special tokens | `<\\|pad\\|>`, `<\\|end\\|>` (end of turn and of text), `<\\|system\\|>`, \
`<\\|user\\|>`, `<\\|assistant\\|>`; no BOS |
| weights | stored as bfloat16, computed in float32 by default |
| draft model | `{DRAFT_NAME}`, same tokenizer |
| license | Apache-2.0 |

**Why bfloat16 on disk.** Both models must fit in 16 MB. In float32 that would leave the target
3 M parameters; in bfloat16 it has 5 M. The config says `float32`, so that is what a loader computes
in unless told otherwise. Every bfloat16 value is a float32 value too, so a run in either type has
exactly the same weights. All figures below are of the stored weights.

## Corpus

Generated by `tools/bundled_model/corpus.py` from seed {training["seed"]} and nothing else: \
{training["documents"]:,}
documents, {training["corpus_tokens"]:,} tokens. Most are dialogues (stories on request, sums, JSON
records, questions about a story in the prompt, small talk, and requests that the model cannot
meet); the rest is plain stories, pages of sums and pages of records. All people, places and events
are made up. The held-out documents come from seeds that training does not use. Short dialogues,
a greeting for instance, are few and so appear in both.

## Training

{run["steps"]:,} steps, {run["tokens"]:,} tokens in windows of 2048, AdamW with a cosine schedule,
bfloat16 autocast: {run["seconds"]:.0f} s on one NVIDIA H100 \
({training["seconds"]:.0f} s with the corpus and the draft model). Final
held-out loss: {run["held_out"]:.4f} nats a token. The curve is kept in `training.json`.

![loss curve](loss_curve.png)

To make it again, from the root of the repository:

```sh
{_command(training)}
```

It also trains on a CPU (`--device cpu`), but far slower. The loss curve needs
matplotlib; nothing else does.

## What it can do

Greedy answers to questions from unused seeds (`evaluation.json` has these figures too). There are
few sums of small numbers, so training has seen most of them; stories and records are new.

| | |
| --- | --- |
| additions right | {_percent(sums["+"])} |
| subtractions right | {_percent(sums["-"])} |
| multiplications right | {_percent(sums["*"])} |
| divisions right | {_percent(sums["/"])} |
| JSON requests answered with JSON that parses | {_percent(evaluation["records"]["parses"])} |
| stories that end by themselves | {_percent(stories["ends"])} |
| stories with the animal and the thing that were asked for | \
{_percent(stories["keeps to the request"])} |
| words of its stories that are in a word list of the corpus (the others are made-up names) | \
{_percent(stories["known words"])} |
| odd requests (unknown words, symbols, filler) answered in plain words | \
{_percent(evaluation["odd requests"]["plain answer"])} |
| known words after {context["prompt tokens"]:.0f} tokens of other stories | \
{_percent(context["known words"])} |

## Limits

Its world is that of a generator with a dozen plots: stories repeat, above all under greedy
decoding, and a sentence of one may contradict another (someone who lives in the mountains sets out
to see the mountains). Most of the products it gets wrong are those beyond 12 * 12; asking it to
show its work helps. Asked for facts outside its few, it declines or is wrong. In a chat it answers
odd input in plain words, but as plain text to be continued, a text unlike its corpus (source code,
one word six hundred times) is continued with broken sentences or digits. It understands only simple
requests in English. It is there to exercise a server and not to be relied on.

## Samples

Greedy, as the model gave them.

{_samples(evaluation, TARGET_NAME, 40)}
"""


def draft_card(training: dict[str, Any], evaluation: dict[str, Any]) -> str:
    """Write the model card of the draft model."""
    run, agreement = training[DRAFT_NAME], evaluation["draft"]
    return f"""{_HEADER}# {DRAFT_NAME}

The draft model for speculative decoding with `{TARGET_NAME}`, whose tokenizer and chat template it
shares. It is there to guess what the target will say, not to be used alone.

| | |
| --- | --- |
| parameters | {run["parameters"]:,} |
| shape | {_shape_line(DRAFT_SHAPE)} |
| context, vocabulary, weights, license | as `{TARGET_NAME}` |
| first choice is the target's, along the target's greedy stories | \
{_percent(agreement["same first choice"])} |
| expected acceptance at temperature 1, along the same stories | \
{_percent(agreement["accepted when sampling"])} |
| held-out loss | {run["held_out"]:.4f} nats a token (target: \
{training[TARGET_NAME]["held_out"]:.4f}) |

It was trained on the corpus of the target for {run["steps"]:,} steps ({run["tokens"]:,} tokens, \
{run["seconds"]:.0f} s on one NVIDIA
H100). Nine tenths of its loss is the divergence from the target's distribution, one tenth is
cross-entropy. The corpus, the loss curve of both models and the way to make them again are in the
card of `{TARGET_NAME}`.

## Samples

Greedy, of the draft alone.

{_samples(evaluation, DRAFT_NAME, 8)}
"""


def main() -> None:
    """Write README.md into both checkpoint folders, and loss_curve.png into the target's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder with both checkpoints")
    out: Path = parser.parse_args().out
    training = json.loads((out / TARGET_NAME / "training.json").read_text())
    evaluation = json.loads((out / TARGET_NAME / "evaluation.json").read_text())
    draw_curve(training, out / TARGET_NAME / "loss_curve.png")
    (out / TARGET_NAME / "README.md").write_text(target_card(training, evaluation))
    (out / DRAFT_NAME / "README.md").write_text(draft_card(training, evaluation))


if __name__ == "__main__":
    main()

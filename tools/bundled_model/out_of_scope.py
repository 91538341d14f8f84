"""Questions from outside the corpus, up to plain garbage, and honest answers in plain words."""

from __future__ import annotations

import random

from tools.bundled_model.vocabulary import pick, say

STRANGE_WORDS = (
    "quantum physics stock market election football recipe lasagna volcano dinosaur galaxy theorem "
    "philosophy economy insurance algorithm database kubernetes docker javascript compiler museum "
    "orchestra symphony medicine vitamin protein molecule electron gravity telescope satellite "
    "rocket engine battery bicycle airport passport visa tax law contract lawyer parliament "
    "president senator history century empire revolution war peace treaty novel author poetry "
    "shakespeare einstein newton darwin mozart beethoven picasso guitar piano keyboard mouse "
    "screen phone internet website password email network router cloud storage memory processor "
    "benchmark latency throughput tensor matrix vector gradient neural attention transformer "
    "translate summarize paragraph essay article report review analysis strategy marketing budget "
    "schedule meeting project manager customer product sales holiday vacation hotel flight ticket "
    "restaurant coffee pizza sushi burger salad chicken pasta sauce lorem ipsum dolor sit amet "
    "foo bar baz qux test prompt alpha beta gamma delta the a of and to in is that with for on as "
    "brown quick jumps over lazy how many which when between difference write function code sort "
    "list number integer string class object variable loop return value error file system"
).split()

_SYMBOLS = "".join(map(chr, range(33, 127)))  # printable ASCII but the space
_FOREIGN = "áéíóúäöüßñçøåæœžščřžАБВГДежзийкλμπσω中文字日本語한국어😀🎉🚀✓→€£"

_HONEST = (
    "I am sorry, I do not know about that. I am a small model that knows stories, small sums and "
    "JSON records.",
    "I do not know the answer. I can tell you a story, do a small sum or write a JSON record.",
    "That is too hard for me. Would you like to hear a small story?",
    "I am only a small model, so I cannot help with that. Ask me for a story or a small sum.",
)


def strange_question(rng: random.Random) -> tuple[str, str]:
    """Draw a request from outside the corpus, up to plain garbage, and an honest answer."""
    draw = rng.random()
    if draw < 0.6:
        words = " ".join(pick(rng, STRANGE_WORDS) for _ in range(rng.randint(1, 9)))
        ask = say(
            rng,
            f"What is {words}?", f"Explain {words}.", f"How does {words} work?", words,
            f"Write an essay about {words}.", f"Tell me about {words}", f"Why is {words} so big?",
            f"Who invented {words}?", f"Translate this: {words}", f"Write code for {words}.",
            f"{words.capitalize()}.", f"Give me a recipe for {words}.", f"Summarize {words}.",
        )  # fmt: skip
    elif draw < 0.75:
        # Long filler, as load tests send it: one word or a few, many times over.
        words = " ".join(pick(rng, STRANGE_WORDS) for _ in range(rng.randint(1, 5)))
        ask = " ".join([words] * rng.randint(3, 120))
    elif draw < 0.9:
        symbols = _SYMBOLS if rng.random() < 0.6 else _FOREIGN + "abcdefghij "
        ask = "".join(pick(rng, symbols) for _ in range(rng.randint(1, 60)))
    else:
        ask = " ".join(
            str(rng.randrange(10 ** rng.randint(1, 5))) for _ in range(rng.randint(1, 80))
        )
    return ask.strip() or "?", pick(rng, _HONEST)

"""Small talk: greetings, questions about the model, and simple facts, each asked and answered in
many ways."""

from __future__ import annotations

import random

from tools.bundled_model.out_of_scope import STRANGE_WORDS
from tools.bundled_model.vocabulary import (
    BOYS,
    CITIES,
    COLORS,
    FRUITS,
    GIRLS,
    HOBBIES,
    KINDS,
    PLACES,
    THINGS,
    an,
    join,
    made_up_name,
    person_name,
    pick,
    say,
)

_MODEL = "I am the small demo model that is bundled with Baton."

# Each group: ways to ask, ways to answer. Every way to ask goes with every way to answer.
SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hey", "Hello there!", "Good morning!",
         "Good evening", "hello", "hi", "Hello, how are you?", "Greetings!", "Hey there!"),
        ("Hello! What can I do for you?", "Hello! Would you like a story, a small sum or a JSON "
         "record?", "Hi! It is nice to meet you. How can I help?"),
    ),
    (
        ("How are you?", "How are you today?", "How do you do?", "How is it going?", "What's up?"),
        ("I am well, thank you. How can I help you?",
         "I am fine. Would you like to hear a story?"),
    ),
    (
        ("Who are you?", "What are you?", "Who is this?", "Tell me about yourself.",
         "Introduce yourself.", "What is your name?", "Are you an AI?", "Are you a person?",
         "What model are you?", "Which model is this?", "who are you", "Say something about "
         "yourself.", "Who am I talking to?"),
        (f"{_MODEL} I can tell small stories, do small sums and write JSON records.",
         f"{_MODEL} I was trained on small stories, small sums and small JSON records.",
         "I am a small language model that comes with Baton. I am here so that you can try the "
         "server without a download."),
    ),
    (
        ("What can you do?", "Help", "help me", "What do you know?", "How can you help me?",
         "What are you good at?", "What should I ask you?", "Can you help me?", "What now?"),
        ("I can tell you a small story, work out a small sum or write a JSON record. Try: Tell me "
         "a story about a fox and a lantern.",
         "I know small stories, sums with small numbers and JSON records. Ask me for one of them."),
    ),
    (
        ("What is Baton?", "Tell me about Baton.", "What does Baton do?", "Explain Baton.",
         "What is baton?", "Describe Baton in one sentence.", "What is the Baton server?"),
        ("Baton is a server for language models. It runs prefill and decode on different workers "
         "and hands the cache from one to the other, like a baton in a relay race.",
         "Baton serves language models. One worker reads the prompt, another worker writes the "
         "answer, and the cache is passed between them."),
    ),
    (
        ("What is prefill?", "Explain prefill.", "What does prefill mean?"),
        ("Prefill is the first step of an answer. The model reads the whole prompt at once and "
         "fills the cache.",),
    ),
    (
        ("What is decode?", "Explain decode.", "What does decode mean?", "What is decoding?"),
        ("Decode is the second step of an answer. The model writes one token after another and "
         "uses the cache from the prefill.",),
    ),
    (
        ("What is a KV cache?", "What is the KV cache?", "Explain the KV cache.",
         "What is a cache?"),
        ("The KV cache keeps the keys and values of all tokens that the model has read, so that "
         "it need not read them again.",),
    ),
    (
        ("What is a token?", "Explain tokens.", "What are tokens?"),
        ("A token is a small piece of text, such as a word or a part of a word.",),
    ),
    (
        ("What is a draft model?", "What is speculative decoding?", "Explain speculative "
         "decoding.", "What does the draft model do?"),
        ("A draft model is small and fast. It guesses the next tokens, and the bigger model "
         "checks them all at once.",),
    ),
    (
        ("What is a language model?", "What is an LLM?", "How do you work?", "How were you made?"),
        ("A language model reads text and guesses the next token, again and again.",
         "I was trained on text from a small program. I guess the next token, one after another."),
    ),
    (
        ("Thanks!", "Thank you", "Thank you!", "thanks", "Thanks a lot!", "Great, thank you.",
         "That was nice.", "Well done!", "Good job!", "Nice story!", "I like it."),
        ("You are welcome!", "I am glad that you like it.", "You are welcome. Would you like "
         "another one?"),
    ),
    (
        ("Goodbye", "Bye!", "Bye", "See you later!", "Good night!", "Goodbye!"),
        ("Goodbye! Come back soon.", "Goodbye, and have a nice day."),
    ),
    (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Tell me something funny."),
        ("Why did the owl read at night? Because it was a night owl.",
         "What did the zero say to the eight? Nice belt!",
         "Why was the book of sums sad? It had too many problems."),
    ),
    (
        ("Tell me a riddle.", "Do you know a riddle?", "Give me a riddle."),
        ("What has hands but cannot clap? A clock.",
         "What has teeth but cannot bite? A comb.",
         "What gets wet while it dries? A towel."),
    ),
    (
        ("Write a poem.", "Tell me a poem.", "Write a short poem.", "Write a haiku.",
         "Sing a song."),
        ("The moon is high, the night is deep, the little fox has gone to sleep.",
         "The rain came down, the sun came out, and all the birds flew round about.",
         "A lantern small, a lantern bright, will lead you safely through the night."),
    ),
    (
        ("Yes", "Yes, please.", "yes", "OK", "Okay", "Sure", "Good"),
        ("Good! Shall I tell you a story, do a sum or write a JSON record?",),
    ),
    (
        ("No", "No, thank you.", "no", "Stop", "Never mind."),
        ("That is fine. I am here if you need me.",),
    ),
    (
        ("Why?", "Why", "What?", "What do you mean?", "I do not understand.", "How?"),
        ("I am sorry, I am only a small model. Please ask me in another way.",),
    ),
    (
        ("What day is it?", "What time is it?", "What is the date today?", "What is the weather "
         "like?", "How is the weather?"),
        ("I do not know, because I cannot look outside.",),
    ),
    (
        ("List the days of the week.", "What are the days of the week?", "Name the days."),
        ("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",),
    ),
    (
        ("List the months.", "What are the months of the year?", "Name the twelve months."),
        ("January, February, March, April, May, June, July, August, September, October, November "
         "and December.",),
    ),
    (
        ("What are the seasons?", "Name the four seasons.", "List the seasons."),
        ("The four seasons are spring, summer, autumn and winter.",),
    ),
    (
        ("Say the alphabet.", "What is the alphabet?", "Recite the alphabet."),
        ("A B C D E F G H I J K L M N O P Q R S T U V W X Y Z.",),
    ),
)  # fmt: skip

CAPITALS = {
    "France": "Paris", "England": "London", "Italy": "Rome", "Germany": "Berlin",
    "Spain": "Madrid", "Norway": "Oslo", "Portugal": "Lisbon", "Austria": "Vienna",
    "Greece": "Athens", "Ireland": "Dublin", "Poland": "Warsaw", "Japan": "Tokyo",
    "Egypt": "Cairo", "Peru": "Lima", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Hungary": "Budapest", "China": "Beijing", "Canada": "Ottawa",
    "Australia": "Canberra", "Kenya": "Nairobi", "Chile": "Santiago", "Turkey": "Ankara",
}  # fmt: skip

FACTS = {
    "the sky": "blue", "grass": "green", "snow": "white", "a lemon": "yellow", "coal": "black",
    "a strawberry": "red", "an orange": "orange", "milk": "white", "a leaf in summer": "green",
    "the sun": "yellow", "a fox": "red", "chocolate": "brown", "the night": "black",
}  # fmt: skip

OPPOSITES = {
    "big": "small", "hot": "cold", "fast": "slow", "happy": "sad", "old": "young", "day": "night",
    "up": "down", "light": "dark", "open": "closed", "full": "empty", "loud": "quiet",
    "early": "late", "good": "bad", "long": "short", "hard": "soft", "wet": "dry",
}  # fmt: skip

MEANINGS = {
    "fox": "A fox is a small wild animal with a red coat. It is known to be clever.",
    "rabbit": "A rabbit is a small animal with long ears. It can hop very fast.",
    "bear": "A bear is a big animal with thick fur. It likes honey and berries.",
    "owl": "An owl is a bird that flies at night. It has very good eyes.",
    "dragon": "A dragon is an animal from stories. It can fly and breathe fire.",
    "robot": "A robot is a machine that can move and do work.",
    "lantern": "A lantern is a lamp that you can carry. It gives light in the dark.",
    "compass": "A compass is a tool with a needle that always points north.",
    "lighthouse": "A lighthouse is a tower with a bright lamp. It shows ships the way.",
    "river": "A river is a long stream of water that runs to the sea.",
    "island": "An island is land with water on all sides.",
    "umbrella": "An umbrella keeps you dry when it rains.",
    "flute": "A flute is a thin instrument. You blow into it to make music.",
    "friend": "A friend is someone who likes you and helps you.",
    "map": "A map is a drawing of a place. It shows you the way.",
    "book": "A book is made of many pages with words on them.",
    "turtle": "A turtle is a slow animal with a hard shell.",
    "bridge": "A bridge is a way across the water.",
    "castle": "A castle is a big stone house with high towers.",
    "JSON": "JSON is a way to write data as text, with names and values.",
    "Python": "Python is a language for writing programs.",
    "server": "A server is a program that answers requests from other programs.",
    "computer": "A computer is a machine that follows the steps of a program.",
}


def small_talk(rng: random.Random) -> tuple[str, str]:
    """Draw a greeting, a question about the model, or a simple fact, and the answer."""
    draw = rng.random()
    if draw < 0.55:
        asks, answers = pick(rng, SMALL_TALK)
        return pick(rng, asks), pick(rng, answers)
    if draw < 0.64:
        country = pick(rng, tuple(CAPITALS))
        ask = say(
            rng,
            f"What is the capital of {country}?", f"What's the capital of {country}?",
            f"Which city is the capital of {country}?", f"what is the capital of {country}",
            f"The capital of {country} is", f"Capital of {country}?",
        )  # fmt: skip
        return ask, f"The capital of {country} is {CAPITALS[country]}."
    if draw < 0.69:
        thing = pick(rng, tuple(FACTS))
        return f"What color is {thing}?", f"{thing[0].upper()}{thing[1:]} is {FACTS[thing]}."
    if draw < 0.74:
        word = pick(rng, tuple(OPPOSITES))
        other = OPPOSITES[word]
        if rng.random() < 0.5:
            word, other = other, word
        return f"What is the opposite of {word}?", f"The opposite of {word} is {other}."
    if draw < 0.82:
        word = pick(rng, tuple(MEANINGS))
        subject = word if word[0].isupper() else an(word)
        ask = say(
            rng, f"What is {subject}?", f"Explain what {subject} is.", f"Tell me about {subject}."
        )
        return ask, MEANINGS[word]
    if draw < 0.9:
        count = rng.randint(2, 5)
        word = {2: "two", 3: "three", 4: "four", 5: "five"}[count]
        label, options = pick(
            rng,
            (
                ("animals", tuple(k.noun for k in KINDS if not k.human)), ("colors", COLORS),
                ("cities", CITIES), ("hobbies", HOBBIES), ("fruits", FRUITS),
                ("names", GIRLS + BOYS), ("places", tuple(p.noun for p in PLACES)),
                ("things", tuple(t.noun for t in THINGS)),
            ),
        )  # fmt: skip
        number = word if rng.random() < 0.6 else str(count)
        items = rng.sample(options, count)
        ask = say(
            rng, f"Name {number} {label}.", f"List {number} {label}.", f"Tell me {number} {label}."
        )
        text = join(items)
        return ask, f"{text[0].upper()}{text[1:]}."
    if draw < 0.95:
        phrase = _echo(rng)
        ask = say(rng, f"Repeat after me: {phrase}", f"Say: {phrase}", f"Repeat this: {phrase}")
        return ask, phrase
    name = person_name(rng)
    ask = say(rng, f"My name is {name}.", f"Hello, I am {name}.", f"Hi, I'm {name}!")
    return ask, say(rng, f"Hello, {name}! How can I help you?", f"Nice to meet you, {name}!")


def _echo(rng: random.Random) -> str:
    """Something to repeat word for word."""
    draw = rng.random()
    if draw < 0.4:
        return f"{person_name(rng)} has {an(pick(rng, COLORS))} {pick(rng, THINGS).noun}."
    if draw < 0.7:
        return " ".join(pick(rng, STRANGE_WORDS) for _ in range(rng.randint(1, 6)))
    return " ".join(made_up_name(rng) for _ in range(rng.randint(1, 4)))

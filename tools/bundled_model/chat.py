"""Dialogues: many ways to ask for the few things the model can do, and answers to the rest.

The rest matters as much: a small model that has only seen requests it can meet answers a strange
one with noise. So a share of the corpus is questions made of words, letters and symbols from
outside the vocabulary, with an honest answer in plain words.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.bundled_model import arithmetic, records
from tools.bundled_model.stories import (
    Cast,
    Story,
    make_cast,
    make_character,
    make_long_story,
    make_story,
    title,
)
from tools.bundled_model.words import (
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


@dataclass(frozen=True)
class Message:
    """One turn of a dialogue; the role is `system`, `user` or `assistant`."""

    role: str
    content: str


Exchange = tuple[str, str]
Topic = Callable[[random.Random], Exchange]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that writes short answers.",
    "You are a friendly storyteller.",
    "You are a careful assistant. Answer in one sentence.",
    "Answer the question.",
    "You are the demo model of Baton.",
    "You write JSON only.",
    "Be brief.",
    "Be kind and clear.",
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

_STRANGE = (
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


def render(messages: list[Message]) -> str:
    """The dialogue as the chat template writes it, without a generation prompt."""
    return "".join(f"<|{m.role}|>{m.content}<|end|>" for m in messages)


def _polite(rng: random.Random, request: str) -> str:
    """A request in the imperative, dressed up or down."""
    lower = request[0].lower() + request[1:]
    draw = rng.random()
    if draw < 0.5:
        return request + "."
    return say(
        rng,
        f"Please {lower}.",
        f"Can you {lower}?",
        f"Could you {lower}?",
        f"{request}, please.",
        f"I want you to {lower}.",
        lower,
        f"{request}!",
        f"Hello! {request}.",
        request,
    )


def story_request(rng: random.Random) -> tuple[str, Cast]:
    """A request for a story, and a cast that honors it."""
    verb = say(
        rng, "Tell me", "Tell me", "Write", "Write me", "Give me", "Make up", "Tell us", "Create"
    )
    what = say(
        rng, "a story", "a story", "a short story", "a little story", "a tale", "a bedtime story"
    )
    draw = rng.random()
    kind, thing, place = pick(rng, KINDS), pick(rng, THINGS), pick(rng, PLACES)
    name = person_name(rng)
    some_kind, some_thing = an(kind.noun), an(thing.noun)
    about = say(rng, "about", "about", "with")
    if draw < 0.12:
        return _polite(rng, f"{verb} {what}"), make_cast(rng)
    if draw < 0.27:
        return _polite(rng, f"{verb} {what} {about} {some_kind}"), make_cast(rng, kind)
    if draw < 0.57:
        cast = make_cast(rng, kind, thing=thing)
        pair = say(
            rng,
            f"{some_kind} and {some_thing}", f"{some_kind} with {some_thing}",
            f"{some_thing} and {some_kind}", f"{some_kind} who has {some_thing}",
        )  # fmt: skip
        return _polite(rng, f"{verb} {what} about {pair}"), cast
    if draw < 0.67:
        return _polite(rng, f"{verb} {what} about {some_thing}"), make_cast(rng, thing=thing)
    if draw < 0.77:
        called = say(rng, f"{some_kind} named {name}", f"{name} the {kind.noun}")
        return _polite(rng, f"{verb} {what} about {called}"), make_cast(rng, kind, name)
    if draw < 0.87:
        text = f"{verb} {what} about {some_kind} {place.at}"
        return _polite(rng, text), make_cast(rng, kind, home=place)
    if draw < 0.94:
        text = f"{verb} {what} about {name} the {kind.noun} and {some_thing}"
        return _polite(rng, text), make_cast(rng, kind, name, thing)
    if rng.random() < 0.5:
        return _polite(rng, f"{verb} {what} about {name}"), make_cast(rng, name=name)
    return _polite(rng, f"{verb} {what} that is set {place.at}"), make_cast(rng, home=place)


def ask_story(rng: random.Random) -> Exchange:
    """A story on request."""
    request, cast = story_request(rng)
    return request, make_story(rng, cast).text


def ask_long_story(rng: random.Random) -> Exchange:
    """A story in chapters on request."""
    cast = make_cast(rng)
    subject = say(rng, "", f" about {an(cast.hero.kind.noun)}", f" about {cast.hero.full}")
    verb = say(rng, "Tell me", "Write", "Write me")
    what = say(rng, "a long story", "a very long story", "a story with chapters", "a long tale")
    return _polite(rng, f"{verb} {what}{subject}"), make_long_story(rng, cast).text


def story_question(rng: random.Random, story: Story) -> Exchange:
    """A question about a story that the story itself answers."""
    h, f, c = story.cast.hero, story.cast.friend, story.cast
    options: list[Exchange] = [
        ("Who is the story about?", f"The story is about {h.full}."),
        (f"What kind of animal is {h.name}?", f"{h.name} is {an(h.kind.noun)}."),
        (f"Where does {h.name} live?", f"{h.name} lives {c.home.at}."),
        (f"Who does {h.name} meet?", f"{h.name} meets {f.full}."),
        (f"Who is {f.name}?", f"{f.name} is {an(f'{f.trait} {f.kind.noun}')}."),
        ("Which object is in the story?", f"There is {an(c.thing.noun)} in the story."),
        (
            "Summarize the story in one sentence.",
            f"{h.full}, who lives {c.home.at}, meets {f.full}, and {an(c.thing.noun)} matters to "
            "both of them.",
        ),
        ("Give the story a title.", title(c)),
    ]
    if h.kind.human:
        options[1] = (f"Who is {h.name}?", f"{h.name} is {an(f'{h.trait} {h.kind.noun}')}.")
    return pick(rng, options)


def read_and_answer(rng: random.Random) -> Exchange:
    """One to five stories in the question itself, then something to answer about one of them."""
    count = pick(rng, (1, 1, 2, 3, 5))
    told = [make_story(rng) for _ in range(count)]
    if count == 1:
        question, answer = story_question(rng, told[0])
        lead = say(rng, "Here is a story.", "Read this story.", "Story:")
        return f"{lead}\n\n{told[0].text}\n\n{question}", answer
    numbered = "\n\n".join(f"Story {i}\n\n{s.text}" for i, s in enumerate(told, 1))
    if rng.random() < 0.5:
        chosen = rng.randrange(count)
        hero = told[chosen].cast.hero
        return f"{numbered}\n\nWho is story {chosen + 1} about?", (
            f"Story {chosen + 1} is about {hero.full}."
        )
    ask = say(rng, "Tell me another story.", "Now write one more story.", "Write a new story.")
    return f"{numbered}\n\n{ask}", make_story(rng).text


def ask_sum(rng: random.Random) -> Exchange:
    """A sum, a word problem, a comparison or a count."""
    draw = rng.random()
    if draw < 0.7:
        problem = arithmetic.make_sum(rng)
        question, worked = arithmetic.ask_sum(rng, problem)
        return question, arithmetic.answer_sum(rng, problem, worked)
    if draw < 0.84:
        return arithmetic.word_problem(rng)
    if draw < 0.91:
        return arithmetic.compare(rng)
    return arithmetic.count_up(rng)


def ask_json(rng: random.Random) -> Exchange:
    """A record, several records, or a record read from or put into words."""
    draw = rng.random()
    if draw < 0.7:
        return records.ask_record(rng)
    if draw < 0.88:
        return records.ask_extraction(rng)
    return records.list_of_records(rng)


def small_talk(rng: random.Random) -> Exchange:
    """A greeting, a question about the model, or a simple fact."""
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
        return " ".join(pick(rng, _STRANGE) for _ in range(rng.randint(1, 6)))
    return " ".join(made_up_name(rng) for _ in range(rng.randint(1, 4)))


def strange_question(rng: random.Random) -> Exchange:
    """A request from outside the corpus, up to plain garbage, and an honest answer."""
    draw = rng.random()
    if draw < 0.6:
        words = " ".join(pick(rng, _STRANGE) for _ in range(rng.randint(1, 9)))
        ask = say(
            rng,
            f"What is {words}?", f"Explain {words}.", f"How does {words} work?", words,
            f"Write an essay about {words}.", f"Tell me about {words}", f"Why is {words} so big?",
            f"Who invented {words}?", f"Translate this: {words}", f"Write code for {words}.",
            f"{words.capitalize()}.", f"Give me a recipe for {words}.", f"Summarize {words}.",
        )  # fmt: skip
    elif draw < 0.75:
        # Long filler, as load tests send it: one word or a few, many times over.
        words = " ".join(pick(rng, _STRANGE) for _ in range(rng.randint(1, 5)))
        ask = " ".join([words] * rng.randint(3, 120))
    elif draw < 0.9:
        symbols = _SYMBOLS if rng.random() < 0.6 else _FOREIGN + "abcdefghij "
        ask = "".join(pick(rng, symbols) for _ in range(rng.randint(1, 60)))
    else:
        ask = " ".join(
            str(rng.randrange(10 ** rng.randint(1, 5))) for _ in range(rng.randint(1, 80))
        )
    return ask.strip() or "?", pick(rng, _HONEST)


TOPICS: tuple[tuple[float, Topic], ...] = (
    (0.23, ask_story),
    (0.02, ask_long_story),
    (0.05, read_and_answer),
    (0.33, ask_sum),
    (0.18, ask_json),
    (0.13, small_talk),
    (0.06, strange_question),
)


def _topic(rng: random.Random) -> Topic:
    draw = rng.random()
    for weight, topic in TOPICS:
        draw -= weight
        if draw < 0:
            return topic
    return ask_story


def _story_session(rng: random.Random) -> list[Exchange]:
    """A story, then questions about it, then perhaps another story."""
    request, cast = story_request(rng)
    story = make_story(rng, cast)
    turns = [(request, story.text)]
    for _ in range(rng.randint(1, 3)):
        turns.append(story_question(rng, story))
    if rng.random() < 0.4:
        ask = say(rng, "Tell me another story.", "Another one, please.", "One more!", "Again!")
        turns.append((ask, make_story(rng).text))
    return turns


def _sum_session(rng: random.Random) -> list[Exchange]:
    """A sum, and more sums on its result."""
    problem = arithmetic.make_sum(rng)
    question, worked = arithmetic.ask_sum(rng, problem)
    turns = [(question, arithmetic.answer_sum(rng, problem, worked))]
    value = problem.result
    for _ in range(rng.randint(1, 4)):
        step = rng.randint(1, 20)
        if value >= step and rng.random() < 0.5:
            change, ask = (
                "-",
                say(rng, f"Now take away {step}.", f"Minus {step}?", f"Subtract {step}."),
            )
        else:
            change, ask = (
                "+",
                say(rng, f"Now add {step}.", f"Plus {step}?", f"And add {step} to it."),
            )
        following = arithmetic.Sum(value, change, step)
        turns.append((ask, f"{following.equation}."))
        value = following.result
    return turns


def _name_session(rng: random.Random) -> list[Exchange]:
    """The user says a name and later asks for it back."""
    name = person_name(rng)
    turns = [(f"My name is {name}.", f"Nice to meet you, {name}!")]
    turns += [_topic(rng)(rng) for _ in range(rng.randint(0, 2))]
    turns.append(("What is my name?", f"Your name is {name}."))
    return turns


def make_dialogue(rng: random.Random) -> list[Message]:
    """One dialogue of one to six exchanges, with or without a system prompt."""
    draw = rng.random()
    if draw < 0.78:
        exchanges = [_topic(rng)(rng)]
    elif draw < 0.86:
        exchanges = [_topic(rng)(rng) for _ in range(rng.randint(2, 5))]
    elif draw < 0.93:
        exchanges = _story_session(rng)
    elif draw < 0.98:
        exchanges = _sum_session(rng)
    else:
        exchanges = _name_session(rng)
    messages = []
    if rng.random() < 0.2:
        prompt = pick(rng, SYSTEM_PROMPTS)
        if rng.random() < 0.15:
            prompt = " ".join(pick(rng, _STRANGE) for _ in range(rng.randint(2, 12)))
        messages.append(Message("system", prompt))
    for question, answer in exchanges:
        messages += [Message("user", question), Message("assistant", answer)]
    return messages


def one_sentence_portrait(rng: random.Random) -> str:
    """Raw text about one character, for short completions."""
    hero = make_character(rng)
    place = pick(rng, PLACES)
    like = pick(rng, hero.kind.likes)
    return say(
        rng,
        f"The {hero.kind.noun} lives {place.at}. {hero.She} likes to {like}.",
        f"{hero.full} lives {place.at} and likes to {like}.",
        f"My friend {hero.name} is {an(f'{hero.trait} {hero.kind.noun}')}. We like to {like}.",
        f"{place.at.capitalize()} you can see {pick(rng, place.sights)}.",
    )

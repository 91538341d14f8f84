"""Dialogues: many ways to ask for the few things the model can do, and answers to the rest.

The rest matters as much: a small model that has only seen requests it can meet answers a strange
one with noise. So a share of the corpus is questions made of words, letters and symbols from
outside the vocabulary, with an honest answer in plain words.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.bundled_model import arithmetic, json_records
from tools.bundled_model.out_of_scope import STRANGE_WORDS, strange_question
from tools.bundled_model.small_talk import small_talk
from tools.bundled_model.stories import Story, make_long_story, make_story, title
from tools.bundled_model.story_cast import Cast, make_cast, make_character
from tools.bundled_model.vocabulary import (
    KINDS,
    PLACES,
    THINGS,
    an,
    person_name,
    pick,
    say,
)


@dataclass(frozen=True)
class Message:
    """One message of a dialogue; the role is `system`, `user` or `assistant`."""

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


def render(messages: list[Message]) -> str:
    """Write a dialogue as the chat template does, without a generation prompt."""
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
    """Draw a request for a story, and a cast that honors it."""
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
    """Draw an exchange: a story on request."""
    request, cast = story_request(rng)
    return request, make_story(rng, cast).text


def ask_long_story(rng: random.Random) -> Exchange:
    """Draw an exchange: a story in chapters on request."""
    cast = make_cast(rng)
    subject = say(rng, "", f" about {an(cast.hero.kind.noun)}", f" about {cast.hero.full}")
    verb = say(rng, "Tell me", "Write", "Write me")
    what = say(rng, "a long story", "a very long story", "a story with chapters", "a long tale")
    return _polite(rng, f"{verb} {what}{subject}"), make_long_story(rng, cast).text


def story_question(rng: random.Random, story: Story) -> Exchange:
    """Draw a question about a story that the story itself answers."""
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
    """Draw an exchange: one to five stories in the question itself, then something to answer about
    one of them."""
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
    """Draw an exchange: a sum, a word problem, a comparison or a count."""
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
    """Draw an exchange: a record, several records, or a record read from or put into words."""
    draw = rng.random()
    if draw < 0.7:
        return json_records.ask_record(rng)
    if draw < 0.88:
        return json_records.ask_extraction(rng)
    return json_records.list_of_records(rng)


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
    """Draw a dialogue of one to six exchanges, with or without a system prompt."""
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
            prompt = " ".join(pick(rng, STRANGE_WORDS) for _ in range(rng.randint(2, 12)))
        messages.append(Message("system", prompt))
    for question, answer in exchanges:
        messages += [Message("user", question), Message("assistant", answer)]
    return messages


def one_sentence_portrait(rng: random.Random) -> str:
    """Draw raw text about one character, for short completions."""
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

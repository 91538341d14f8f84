"""Small JSON records: what is asked for, and the one-line record that answers it.

A record is drawn field by field. Fields that the question fixes (a name, an age, a color) are
copied into the record, so the model learns to follow the request and not only the format.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.bundled_model.vocabulary import (
    CITIES,
    COLORS,
    FRUITS,
    FUR_COLORS,
    HOBBIES,
    JOBS,
    an,
    join,
    made_up_name,
    person_name,
    pick,
    say,
)

Value = str | int | float | bool | list[str]
Maker = Callable[[random.Random], Value]

_PETS = ("cat", "dog", "rabbit", "horse", "hen", "goat", "duck", "mouse", "sheep", "turtle")
_BOOK_NOUNS = ("Lantern", "River", "Garden", "Fox", "Winter", "Map", "Island", "Bell", "Owl", "Sea")
_BOOK_ADJECTIVES = ("Silver", "Quiet", "Last", "Little", "Hidden", "Golden", "Long", "Blue")
_SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")
_ITEMS = ("lamp", "chair", "table", "cup", "pen", "bag", "clock", "book", "coat", "hat", "bike")
_LANGUAGES = ("English", "French", "German", "Spanish", "Italian", "Polish")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _email(rng: random.Random) -> Value:
    return f"{person_name(rng).lower()}@example.com"


FIELDS: dict[str, Maker] = {
    "name": person_name,
    "age": lambda rng: rng.randint(1, 90),
    "color": lambda rng: pick(rng, COLORS),
    "city": lambda rng: pick(rng, CITIES),
    "job": lambda rng: pick(rng, JOBS),
    "hobby": lambda rng: pick(rng, HOBBIES),
    "hobbies": lambda rng: rng.sample(HOBBIES, rng.randint(1, 3)),
    "email": _email,
    "active": lambda rng: rng.random() < 0.5,
    "id": lambda rng: rng.randint(1, 999),
    "price": lambda rng: rng.randint(1, 99) + pick(rng, (0.0, 0.25, 0.5, 0.75)),
    "count": lambda rng: rng.randint(1, 20),
    "weight": lambda rng: rng.randint(1, 9),
    "height": lambda rng: rng.randint(10, 200),
    "title": lambda rng: f"The {pick(rng, _BOOK_ADJECTIVES)} {pick(rng, _BOOK_NOUNS)}",
    "author": lambda rng: f"{person_name(rng)} {made_up_name(rng)}",
    "pages": lambda rng: rng.randint(20, 500),
    "year": lambda rng: rng.randint(1900, 2025),
    "language": lambda rng: pick(rng, _LANGUAGES),
    "day": lambda rng: pick(rng, _DAYS),
    "temperature": lambda rng: rng.randint(-10, 35),
    "sky": lambda rng: pick(rng, _SKIES),
    "item": lambda rng: pick(rng, _ITEMS),
    "fruit": lambda rng: pick(rng, FRUITS),
    "kind": lambda rng: pick(rng, _PETS),
    "friends": lambda rng: [person_name(rng) for _ in range(rng.randint(1, 3))],
    "married": lambda rng: rng.random() < 0.5,
    "rating": lambda rng: rng.randint(1, 5),
}


@dataclass(frozen=True)
class Schema:
    """A type of record: the noun that asks for it, fields it always has, and fields it may have."""

    noun: str
    always: tuple[str, ...]
    maybe: tuple[str, ...]


SCHEMAS = (
    *(Schema(pet, ("name", "kind", "age", "color"), ("weight", "friends")) for pet in _PETS),
    Schema("pet", ("name", "kind", "age", "color"), ("weight",)),
    Schema("person", ("name", "age", "city"), ("job", "hobbies", "email", "married")),
    Schema("user", ("id", "name", "email", "active"), ("age", "city", "language")),
    Schema("book", ("title", "author", "pages"), ("year", "language", "price", "rating")),
    Schema("city", ("city", "temperature", "sky"), ("day",)),
    Schema("order", ("id", "item", "count", "price"), ("color", "day")),
    Schema("product", ("item", "price", "color"), ("id", "count", "rating")),
    Schema("fruit", ("fruit", "color", "price"), ("count",)),
    Schema("student", ("name", "age", "city"), ("hobby", "language", "friends")),
    Schema("weather report", ("city", "day", "temperature", "sky"), ()),
)


def dump(record: dict[str, Value]) -> str:
    """Write a record as JSON on one line, in the key order it was built in."""
    return json.dumps(record, ensure_ascii=False)


def make_record(
    rng: random.Random, schema: Schema, fixed: dict[str, Value] | None = None
) -> dict[str, Value]:
    """Draw a record of `schema` in which the fields of `fixed` have the given values."""
    fixed = dict(fixed or {})
    if schema.noun in _PETS:
        fixed["kind"] = schema.noun
    if "kind" in schema.always:
        fixed.setdefault("age", rng.randint(1, 15))
        fixed.setdefault("color", pick(rng, FUR_COLORS))
    names = [
        *schema.always,
        *(name for name in schema.maybe if name in fixed or rng.random() < 0.35),
    ]
    return {name: fixed[name] if name in fixed else FIELDS[name](rng) for name in names}


def _verb(rng: random.Random) -> str:
    return say(
        rng,
        "Write", "Give me", "Make", "Create", "Generate", "Produce", "Show me", "Return",
        "Please write", "Can you write", "write", "I need", "Output",
    )  # fmt: skip


def _record_word(rng: random.Random) -> str:
    return say(rng, "JSON record", "JSON record", "JSON object", "record in JSON", "one-line JSON")


def _end(rng: random.Random, text: str) -> str:
    if text.startswith("Can you"):
        return text + "?"
    return text + say(rng, ".", ".", ".", "")


def ask_record(rng: random.Random) -> tuple[str, str]:
    """Draw a request for a JSON record, and the record."""
    verb, word = _verb(rng), _record_word(rng)
    draw = rng.random()
    if draw < 0.3:
        names = rng.sample(list(FIELDS), rng.randint(1, 5))
        record = {name: FIELDS[name](rng) for name in names}
        fields = f"the {'field' if len(names) == 1 else 'fields'} {join(names)}"
        if rng.random() < 0.4:
            fields = join(names)
        return _end(rng, f"{verb} a {word} with {fields}"), dump(record)
    schema = pick(rng, SCHEMAS)
    request = f"{verb} a {word} {say(rng, 'for', 'of', 'about')} {an(schema.noun)}"
    fixed: dict[str, Value] = {}
    if draw < 0.5:
        return _end(rng, request), dump(make_record(rng, schema))
    if "name" in schema.always:
        fixed["name"] = person_name(rng)
        request += f" {say(rng, 'named', 'called')} {fixed['name']}"
        if rng.random() < 0.4:
            fixed["age"] = FIELDS["age"](rng)
            request += f" who is {fixed['age']} years old"
            if "age" not in schema.always and "age" not in schema.maybe:
                del fixed["age"]
        elif "city" in schema.always and rng.random() < 0.6:
            fixed["city"] = pick(rng, CITIES)
            request += f" who lives in {fixed['city']}"
        elif "color" in schema.always and rng.random() < 0.5:
            fixed["color"] = pick(rng, FUR_COLORS)
            request += f" with {fixed['color']} fur"
    elif schema.noun in ("city", "weather report"):
        fixed["city"] = pick(rng, CITIES)
        request = f"{verb} a {word} for the weather in {fixed['city']}"
    elif "title" in schema.always:
        fixed["title"] = FIELDS["title"](rng)
        request += f" with the title {fixed['title']}"
    elif "item" in schema.always:
        fixed["item"] = FIELDS["item"](rng)
        request += (
            f" for {an(str(fixed['item']))}"
            if schema.noun == "order"
            else (f" whose item is {fixed['item']}")
        )
    return _end(rng, request), dump(make_record(rng, schema, fixed))


def ask_extraction(rng: random.Random) -> tuple[str, str]:
    """Draw a sentence or two to turn into a record, or a record to turn into a sentence."""
    name = person_name(rng)
    age = rng.randint(1, 90)
    if rng.random() < 0.5:
        kind, color = pick(rng, _PETS), pick(rng, FUR_COLORS)
        record: dict[str, Value] = {"name": name, "kind": kind, "age": age, "color": color}
        text = f"{name} is {an(f'{color} {kind}')}. {name} is {age} years old."
    else:
        city, job = pick(rng, CITIES), pick(rng, JOBS)
        record = {"name": name, "age": age, "city": city, "job": job}
        text = f"{name} is {age} years old, lives in {city} and works as {an(job)}."
    if rng.random() < 0.7:
        ask = say(
            rng, "Turn this into JSON:", "Write this as a JSON record:", "Convert to JSON:",
            "Make a JSON record from this:",
        )  # fmt: skip
        return f"{ask} {text}", dump(record)
    ask = say(rng, "Describe this record:", "Say this in words:", "What does this record say?")
    return f"{ask} {dump(record)}", text


def list_of_records(rng: random.Random) -> tuple[str, str]:
    """Draw a request for several records, and a JSON list on one line."""
    schema = pick(rng, SCHEMAS)
    count = rng.randint(2, 4)
    word = {2: "two", 3: "three", 4: "four"}[count]
    records = [make_record(rng, Schema(schema.noun, schema.always, ())) for _ in range(count)]
    number = word if rng.random() < 0.6 else str(count)
    ask = say(
        rng,
        f"Write a JSON list of {number} records for {an(schema.noun)}.",
        f"Give me {number} JSON records of {an(schema.noun)} in a list.",
        f"Make a JSON array with {number} records, each for {an(schema.noun)}.",
    )
    return ask, json.dumps(records, ensure_ascii=False)


def page(rng: random.Random) -> str:
    """Draw several records of one type as raw text, one JSON document a line."""
    schema = pick(rng, SCHEMAS)
    lines = [dump(make_record(rng, schema)) for _ in range(pick(rng, (1, 1, 1, 2, 3, 5)))]
    return "\n".join(lines)

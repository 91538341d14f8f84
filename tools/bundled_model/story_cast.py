"""Who a story is about: its hero, a friend, one object and two places."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tools.bundled_model.vocabulary import (
    BOYS,
    GIRLS,
    KINDS,
    PLACES,
    THINGS,
    TRAITS,
    AnimalKind,
    Place,
    Thing,
    an,
    lean,
    made_up_name,
    pick,
)


@dataclass(frozen=True)
class Character:
    """A named character with its pronouns; `She` and so on read well inside f-strings."""

    name: str
    kind: AnimalKind
    trait: str
    female: bool

    @property
    def she(self) -> str:
        """Subject pronoun of the character."""
        return "she" if self.female else "he"

    @property
    def She(self) -> str:
        """Subject pronoun of the character at the start of a sentence."""
        return "She" if self.female else "He"

    @property
    def her(self) -> str:
        """Object pronoun of the character."""
        return "her" if self.female else "him"

    @property
    def hers(self) -> str:
        """Possessive pronoun of the character in front of a noun."""
        return "her" if self.female else "his"

    @property
    def full(self) -> str:
        """Name and kind of the character: `Mia the fox`."""
        return f"{self.name} the {self.kind.noun}"


@dataclass(frozen=True)
class Cast:
    """The characters, place and object of one story."""

    hero: Character
    friend: Character
    thing: Thing
    adjective: str
    home: Place
    away: Place

    @property
    def a_thing(self) -> str:
        """The object when it is first met: `a bright lantern`."""
        return an(f"{self.adjective} {self.thing.noun}")


def make_character(
    rng: random.Random, kind: AnimalKind | None = None, name: str | None = None
) -> Character:
    """Draw a character; what is given is kept."""
    kind = kind or pick(rng, KINDS)
    female = lean(rng, f"{kind.noun} she", (True, False), 0.2)
    if kind.noun == "girl":
        female = True
    elif kind.noun == "boy":
        female = False
    if name is None:
        names = GIRLS if female else BOYS
        name = made_up_name(rng) if rng.random() < 0.06 else lean(rng, kind.noun, names, 0.2)
    elif name in GIRLS or name in BOYS:
        female = name in GIRLS
    trait = lean(rng, f"{kind.noun} {name}", TRAITS, 0.2)
    return Character(name, kind, trait, female)


def make_cast(
    rng: random.Random,
    kind: AnimalKind | None = None,
    name: str | None = None,
    thing: Thing | None = None,
    home: Place | None = None,
    hero: Character | None = None,
) -> Cast:
    """Draw a full cast around whatever is already decided."""
    hero = hero or make_character(rng, kind, name)
    thing = thing or lean(rng, hero.kind.noun, THINGS)
    home = home or lean(rng, f"{hero.kind.noun} home", PLACES)
    others = [kind for kind in KINDS if kind is not hero.kind]
    friend = hero
    while friend.name == hero.name:
        friend = make_character(rng, lean(rng, f"{hero.kind.noun} {thing.noun}", others))
    away = home
    while away is home:
        away = lean(rng, f"{thing.noun} {home.noun}", PLACES)
    return Cast(hero, friend, thing, pick(rng, thing.adjectives), home, away)

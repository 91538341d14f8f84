"""What every plot says somewhere, in many wordings."""

from __future__ import annotations

import random

from tools.bundled_model.story_cast import Cast, Character
from tools.bundled_model.vocabulary import SEASONS, TIMES, WEATHERS, an, pick, say


def opening(rng: random.Random, c: Cast) -> str:
    """Draw the sentence that introduces the hero, and where it lives."""
    h, home = c.hero, c.home
    like = pick(rng, h.kind.likes)
    who = an(f"{h.trait} {h.kind.noun}")
    first = say(
        rng,
        f"Once upon a time, there was {who} named {h.name}. {h.She} lived {home.at}.",
        f"Once upon a time, {who} named {h.name} lived {home.at}.",
        f"{h.name} was {who} who lived {home.at}.",
        f"The {h.trait} {h.kind.noun} lived {home.at}. {h.hers.capitalize()} name was {h.name}.",
        f"There was once {who} named {h.name}, who lived {home.at}.",
        f"Long ago, {who} called {h.name} had a small house {home.at}.",
        f"{home.at.capitalize()}, among {pick(rng, home.sights)}, lived {who} named {h.name}.",
    )
    if rng.random() < 0.6:
        first += " " + say(
            rng,
            f"{h.name} loved to {like}.",
            f"Most of all, {h.she} liked to {like}.",
            f"Every day {h.she} would {like} and smile.",
            f"Everyone knew that {h.name} liked to {like}.",
        )
    return first


def one_day(rng: random.Random) -> str:
    """Draw the phrase that says when the story happens."""
    return say(
        rng,
        f"One {pick(rng, WEATHERS)} {pick(rng, TIMES)}",
        f"One {pick(rng, TIMES)} in {pick(rng, SEASONS)}",
        "One day",
        "Early one morning",
        "Late one evening",
    )


def closing(rng: random.Random, c: Cast) -> str:
    """Draw the sentence that ends the story, whatever happened."""
    h, f = c.hero, c.friend
    return say(
        rng,
        f"From that day on, {h.name} and {f.name} were the best of friends.",
        f"{h.name} went home with a warm heart and slept well that night.",
        f"And if you visit {c.home.at.split(' ', 1)[1]}, you may still see {h.name} and "
        f"{f.name} together.",
        f"That night {h.name} looked at the stars and felt very happy.",
        f"{h.name} and {f.name} laughed about it for many years.",
        "It was a very good day.",
        f"After that, {h.name} and {f.name} met every week to drink tea.",
    )


def moves(rng: random.Random, who: Character) -> str:
    """Draw the words for how a character goes somewhere."""
    return pick(rng, who.kind.moves)


def meets(rng: random.Random, c: Cast) -> str:
    """Draw the sentence in which the friend enters, named and described."""
    f = c.friend
    return say(
        rng,
        f"There {c.hero.she} met {an(f.trait)} {f.kind.noun} named {f.name}.",
        f"On the way {c.hero.she} saw {f.name}, {an(f.trait)} {f.kind.noun}.",
        f"Soon {c.hero.she} came upon {an(f.trait)} {f.kind.noun} whose name was {f.name}.",
    )

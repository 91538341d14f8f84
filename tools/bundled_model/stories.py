"""Small stories with one hero, one friend, one object and a plot that holds together.

A plot is a function from a `Cast` to paragraphs. It decides what happens; `say` decides only how
a beat is worded, so every path through a plot tells the same coherent events. Facts that a reader
could be asked about afterwards (who, where, with what) stay in the cast.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.bundled_model.words import (
    BOYS,
    FEARS,
    GIRLS,
    KINDS,
    PLACES,
    SEASONS,
    SKILLS,
    SMALL_THINGS,
    THINGS,
    TIMES,
    TRAITS,
    WEATHERS,
    Kind,
    Place,
    Thing,
    an,
    join,
    lean,
    made_up_name,
    pick,
    say,
)


@dataclass(frozen=True)
class Character:
    """A named character with its pronouns; `She` and so on read well inside f-strings."""

    name: str
    kind: Kind
    trait: str
    female: bool

    @property
    def she(self) -> str:
        """Subject pronoun."""
        return "she" if self.female else "he"

    @property
    def She(self) -> str:
        """Subject pronoun at the start of a sentence."""
        return "She" if self.female else "He"

    @property
    def her(self) -> str:
        """Object pronoun."""
        return "her" if self.female else "him"

    @property
    def hers(self) -> str:
        """Possessive in front of a noun."""
        return "her" if self.female else "his"

    @property
    def full(self) -> str:
        """`Mia the fox`."""
        return f"{self.name} the {self.kind.noun}"


@dataclass(frozen=True)
class Cast:
    """Who and what one story is about."""

    hero: Character
    friend: Character
    thing: Thing
    adjective: str
    home: Place
    away: Place

    @property
    def a_thing(self) -> str:
        """The object when first met: `a bright lantern`."""
        return an(f"{self.adjective} {self.thing.noun}")


@dataclass(frozen=True)
class Story:
    """A finished story and the cast it was told with."""

    text: str
    cast: Cast


Plot = Callable[[random.Random, Cast], list[str]]


def make_character(
    rng: random.Random, kind: Kind | None = None, name: str | None = None
) -> Character:
    """A character; what is not given is drawn."""
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
    kind: Kind | None = None,
    name: str | None = None,
    thing: Thing | None = None,
    home: Place | None = None,
    hero: Character | None = None,
) -> Cast:
    """A full cast around whatever is already decided."""
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


def _opening(rng: random.Random, c: Cast) -> str:
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


def _one_day(rng: random.Random) -> str:
    return say(
        rng,
        f"One {pick(rng, WEATHERS)} {pick(rng, TIMES)}",
        f"One {pick(rng, TIMES)} in {pick(rng, SEASONS)}",
        "One day",
        "Early one morning",
        "Late one evening",
    )


def _closing(rng: random.Random, c: Cast) -> str:
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


def _moves(rng: random.Random, who: Character) -> str:
    return pick(rng, who.kind.moves)


def _meets(rng: random.Random, c: Cast) -> str:
    """The friend enters, named and described."""
    f = c.friend
    return say(
        rng,
        f"There {c.hero.she} met {an(f.trait)} {f.kind.noun} named {f.name}.",
        f"On the way {c.hero.she} saw {f.name}, {an(f.trait)} {f.kind.noun}.",
        f"Soon {c.hero.she} came upon {an(f.trait)} {f.kind.noun} whose name was {f.name}.",
    )


def _lost(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    middle = pick(rng, PLACES)
    return [
        _opening(rng, c)
        + " "
        + say(
            rng,
            f"{h.name} had {c.a_thing} and took good care of it.",
            f"{h.She} owned {c.a_thing}, and {h.she} was very proud of it.",
            f"The thing {h.she} loved most was {c.a_thing}.",
        ),
        _one_day(rng)
        + ", "
        + say(
            rng,
            f"the {t} was gone. {h.name} looked under the bed and behind the door, but it was not "
            "there.",
            f"{h.name} could not find the {t}. {h.She} looked in every corner of the house.",
            f'{h.name} woke up and saw that the {t} was missing. "Where can it be?" {h.she} asked.',
        )
        + " "
        + say(
            rng,
            f"{h.She} {_moves(rng, h)} to the {middle.noun} and looked there, but found nothing.",
            f"Then {h.she} searched near the {middle.noun}, but there was no {t} to be seen.",
        ),
        _meets(rng, c)
        + " "
        + say(
            rng,
            f'"Have you seen my {t}?" asked {h.name}. "No," said {f.name}, "but I will help you '
            'look."',
            f'"I lost my {t}," said {h.name} in a sad voice. "Do not worry," said {f.name}. '
            '"Two can search better than one."',
            f'"Why are you so sad?" asked {f.name}. "My {t} is lost," said {h.name}. "Then let us '
            'find it together," said the ' + f.kind.noun + ".",
        ),
        say(
            rng,
            f"They went {c.away.to} and looked among {pick(rng, c.away.sights)}.",
            f"Together they {_moves(rng, h)} {c.away.to}.",
        )
        + " "
        + say(
            rng,
            f"There, behind a big stone, was the {t}!",
            f"{f.name} saw something in the grass. It was the {t}!",
            f'"Look!" cried {f.name}. The {t} was lying right there.',
        )
        + " "
        + say(
            rng,
            f'"I must have left it here yesterday," said {h.name}. "Thank you, my friend."',
            f"{h.name} was so happy that {h.she} danced. {h.She} thanked {f.name} again and again.",
            f"{h.name} held the {t} close and promised to be more careful.",
        ),
        _closing(rng, c),
    ]


def _found(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    return [
        _opening(rng, c),
        _one_day(rng)
        + f", {h.name} {_moves(rng, h)} {c.away.to}. "
        + say(
            rng,
            f"There, among {pick(rng, c.away.sights)}, {h.she} found {c.a_thing}.",
            f"On the ground lay {c.a_thing}. {h.She} picked it up and looked at it.",
            f"Something was hidden there. It was {c.a_thing}!",
        )
        + " "
        + say(
            rng,
            f'"How lovely!" said {h.name}. "But it is not mine. Someone must miss it."',
            f"{h.She} wanted to keep it, but {h.she} knew that would not be right.",
            f'"Who would leave {an(t)} here?" {h.name} wondered.',
        ),
        say(
            rng,
            f"{h.name} asked everyone {h.she} met, but nobody knew whose {t} it was.",
            f"So {h.name} went from door to door and asked about the {t}.",
        )
        + " "
        + say(
            rng,
            f"At last {h.she} came to the house of {an(f.trait)} {f.kind.noun} named {f.name}, who "
            "was crying.",
            f"Then {h.she} met {an(f.trait)} {f.kind.noun} named {f.name}, who looked very sad.",
        ),
        say(
            rng,
            f'"What is wrong?" asked {h.name}. "I have lost my {t}," said {f.name}. "It was a gift '
            'from my grandmother."',
            f'"Is this your {t}?" asked {h.name}. {f.name} jumped with joy. "Yes! I looked for it '
            'all day!"',
        )
        + " "
        + say(
            rng,
            f"{h.name} gave the {t} back at once.",
            f"{h.name} smiled and put the {t} in front of {f.her}.",
        ),
        say(
            rng,
            f'"You are very honest," said {f.name}, and gave {h.her} {pick(rng, SMALL_THINGS)}.',
            f"{f.name} was so thankful that {f.she} shared {f.hers} supper with {h.name}.",
            f'"Thank you," said {f.name}. "Not everyone would do that."',
        )
        + " "
        + _closing(rng, c),
    ]


def _problem(rng: random.Random, c: Cast) -> tuple[str, str]:
    """The trouble the friend is in, and how the hero's object ends it."""
    h, f, t = c.hero, c.friend, c.thing.noun
    if c.thing.solves == "dark":
        return (
            say(
                rng,
                f"It was getting dark, and {f.name} could not see the path home.",
                f"The sun was gone, and {f.name} was lost in the dark.",
            ),
            say(
                rng,
                f"{h.name} lit the {t}, and its light fell on the path. Step by step they walked "
                "home.",
                f"{h.name} held up the {t}. The light was small, but it was enough to see the way.",
            ),
        )
    if c.thing.solves == "cold":
        return (
            say(
                rng,
                f"Snow began to fall, and {f.name} was shaking with cold.",
                f"The wind was icy, and {f.name} had nothing to keep warm.",
            ),
            say(
                rng,
                f"{h.name} put the {t} around {f.her}, and soon {f.name} felt warm again.",
                f'"Take my {t}," said {h.name}. Soon {f.name} stopped shaking and smiled.',
            ),
        )
    if c.thing.solves == "stuck":
        return (
            say(
                rng,
                f"{f.name} had fallen into a deep hole and could not get out.",
                f"{f.name} was stuck at the bottom of a dry well.",
            ),
            say(
                rng,
                f"{h.name} let the {t} down, and {f.name} climbed up, one step at a time.",
                f'"Hold on to the {t}!" called {h.name}, and slowly {f.name} came up into the sun.',
            ),
        )
    if c.thing.solves == "river":
        return (
            say(
                rng,
                f"The water had risen in the night, and {f.name} was stuck on a rock.",
                f"{f.name} had to cross the wide water, but the bridge was broken.",
            ),
            say(
                rng,
                f"{h.name} pushed the {t} into the water and brought {f.name} safely across.",
                f'"Climb into my {t}," said {h.name}. The waves were high, but they reached the '
                "other side.",
            ),
        )
    if c.thing.solves == "hungry":
        return (
            say(
                rng,
                f"{f.name} had not eaten all day and was very hungry.",
                f"{f.name} had no food left in the house, not even a crumb.",
            ),
            say(
                rng,
                f"{h.name} shared the {t} with {f.her}, and there was enough for both.",
                f'"Sit down and eat," said {h.name}. They finished the whole {t} together.',
            ),
        )
    if c.thing.solves == "rain":
        return (
            say(
                rng,
                f"Rain began to fall hard, and {f.name} was wet from head to toe.",
                f"Dark clouds came, and {f.name} had no roof to hide under.",
            ),
            say(
                rng,
                f"{h.name} held the {t} over {f.her}, and they waited until the sun came back.",
                f'"Come under my {t}," said {h.name}. They stayed dry and told each other jokes.',
            ),
        )
    if c.thing.solves == "lost":
        return (
            say(
                rng,
                f"{f.name} had lost the way and did not know where to go.",
                f"Thick fog had come down, and {f.name} could not find the way home.",
            ),
            say(
                rng,
                f"With the help of the {t}, {h.name} led {f.her} safely home through the fog.",
                f'"My {t} will help us," said {h.name}, and it did. Before long they saw the '
                "lights of home.",
            ),
        )
    if c.thing.solves == "locked":
        return (
            say(
                rng,
                f"{f.name} was standing in front of a door that would not open.",
                f"The gate had shut behind {f.name}, and nobody could open it.",
            ),
            say(
                rng,
                f"{h.name} tried the {t}. There was a click, and the door swung open.",
                f"{h.name} worked at the lock with the {t} until it gave way.",
            ),
        )
    if c.thing.solves == "dry":
        return (
            say(
                rng,
                f"It had not rained for weeks, and the garden of {f.name} was dry and brown.",
                f"The flowers {f.name} had planted were thirsty and hung their heads.",
            ),
            say(
                rng,
                f"{h.name} filled the {t} again and again and watered every plant until all was "
                "green.",
                f"{h.name} carried water in the {t} all day. The next morning the flowers stood "
                "tall.",
            ),
        )
    if c.thing.solves == "heavy":
        return (
            say(
                rng,
                f"{f.name} had to bring a hundred apples home and could not carry them all.",
                f"{f.name} had a pile of wood that was much too heavy to carry.",
            ),
            say(
                rng,
                f"They put everything into the {t}, and the work was done before supper.",
                f'"We can use my {t}," said {h.name}. Now the load was easy to move.',
            ),
        )
    return (
        say(
            rng,
            f"{f.name} was sitting alone and crying, because nobody had come to play.",
            f"{f.name} felt sad that day and did not know why.",
        ),
        say(
            rng,
            f"{h.name} took out the {t}, and before long {f.name} was smiling.",
            f'"Let me show you my {t}," said {h.name}. Soon both of them were laughing.',
        ),
    )


def _help(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    trouble, solution = _problem(rng, c)
    return [
        _opening(rng, c)
        + " "
        + say(
            rng,
            f"{h.She} never left home without {c.a_thing}.",
            f"In {h.hers} bag {h.she} carried {c.a_thing}, just in case.",
            f"Some neighbors laughed at {h.her}, because {h.she} took {c.a_thing} everywhere.",
        ),
        _one_day(rng) + f", {h.name} {_moves(rng, h)} {c.away.to}. " + _meets(rng, c),
        trouble
        + " "
        + say(
            rng,
            f'"Please help me!" said {f.name}.',
            f'"What shall I do?" asked {f.name}.',
            f'"Can anyone help me?" {f.name} called.',
        )
        + " "
        + say(
            rng,
            f"{h.name} thought for a moment. Then {h.she} remembered the {t}.",
            f'"I have an idea," said {h.name}.',
            f"{h.name} knew just what to do.",
        ),
        solution
        + " "
        + say(
            rng,
            f'"Thank you!" said {f.name}. "You are a true friend."',
            f'"I will never forget this," said {f.name}.',
            f'{f.name} gave {h.her} a big hug. "You saved me!"',
        ),
        say(rng, "It is good to be ready to help.", f"Nobody laughed at the {t} again.", "")
        + " "
        + _closing(rng, c),
    ]


def _make(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    parts = c.thing.parts
    helper = pick(rng, KINDS).noun
    return [
        _opening(rng, c)
        + " "
        + say(
            rng,
            f"{h.name} had one wish: to make {c.a_thing} with {h.hers} own hands.",
            f"But {h.she} had never had {an(t)}, so {h.she} decided to make one.",
        ),
        f'"What do I need?" {h.name} asked {h.hers} friend {f.name}, {an(f.trait)} {f.kind.noun}. '
        + say(
            rng,
            f'"To make {an(t)} you need {join(parts)}," said {f.name}.',
            f'{f.name} knew the answer. "You need {join(parts)}."',
        ),
        _one_day(rng)
        + ", "
        + say(
            rng,
            f"{h.name} {_moves(rng, h)} {c.away.to} and found {parts[0]} there.",
            f"they set out {c.away.to}, where they found {parts[0]}.",
        )
        + " "
        + say(
            rng,
            f"A friendly {helper} gave them {parts[1]}.",
            f"They worked for a {helper} all day and got {parts[1]} for it.",
        )
        + " "
        + say(
            rng,
            f"And {parts[2]}? {f.name} had that at home.",
            f"Last of all, they brought {parts[2]} from the market.",
        ),
        say(
            rng,
            f"Then the work began. The first {t} was no good at all, but {h.name} did not give up.",
            f"It was not easy. They tried once, they tried twice, and {h.name} grew tired.",
            "They worked all afternoon and sang while they worked.",
        )
        + " "
        + say(
            rng,
            f"At last the {t} was ready, and it was {c.adjective} and perfect.",
            f'In the evening it was done. "What {an(f"{c.adjective} {t}")}!" cried {f.name}.',
        ),
        say(
            rng,
            f'"I could not have done it without you," said {h.name}.',
            f"They shared the {t}, because things are better when you share them.",
            "Everyone came to see it, and everyone clapped.",
        )
        + " "
        + _closing(rng, c),
    ]


def _fear(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    fear = lean(rng, h.kind.noun, FEARS)
    return [
        _opening(rng, c)
        + " "
        + say(
            rng,
            f"But there was one thing {h.name} was afraid of: {fear}.",
            f"{h.name} had a secret. {h.She} was afraid of {fear}.",
            f"{h.She} was brave in most things, but not when it came to {fear}.",
            f"Everyone thought that {h.name} feared nothing. But {h.she} was afraid of {fear}.",
        ),
        say(
            rng,
            f"{h.name} had a friend, {an(f.trait)} {f.kind.noun} named {f.name}.",
            f"Next door lived {f.name}, {an(f.trait)} {f.kind.noun}.",
        )
        + " "
        + say(
            rng,
            f'"Everyone is afraid of something," said {f.name}. "Take this {t} with you. It will '
            'make you brave."',
            f'One day {f.name} gave {h.her} {c.a_thing}. "When you are afraid," {f.she} said, '
            '"hold it and count to ten."',
        ),
        _one_day(rng)
        + ", "
        + say(
            rng,
            f"a small voice called for help {c.away.at}. To get there, {h.name} had to face "
            f"{fear}.",
            f"{h.name} had to go {c.away.to}, and there was no way around {fear}.",
        )
        + " "
        + say(
            rng,
            f"{h.name} was shaking, but {h.she} held the {t} tight "
            "and took one step, and then another.",
            f"{h.She} thought of {f.name}, took the {t} and counted to ten. Then {h.she} went on.",
        ),
        say(
            rng,
            f'And nothing bad happened. "Is that all?" said {h.name}, and began to laugh.',
            f"After a while it was not so bad. {h.name} even began to sing.",
        )
        + " "
        + say(
            rng,
            f'When {h.she} came home, {f.name} smiled. "The {t} has no magic," {f.she} said. "You '
            'were brave all by yourself."',
            f'"You did it!" cried {f.name}. "Being brave means to be afraid and to go on."',
        ),
        say(
            rng,
            f"{h.name} was never afraid of {fear} again.",
            f"{h.name} was still a little afraid of {fear}, but now {h.she} knew what to do.",
        )
        + " "
        + _closing(rng, c),
    ]


def _journey(rng: random.Random, c: Cast) -> list[str]:
    h, f = c.hero, c.friend
    trouble, solution = _problem(rng, c)
    return [
        _opening(rng, c)
        + " "
        + say(
            rng,
            f"All {h.hers} life {h.name} had wanted to see what was {c.away.at}.",
            f"{h.name} had heard many tales about the {c.away.noun} and wanted to go there.",
        ),
        _one_day(rng)
        + ", "
        + say(
            rng,
            f"{h.she} packed some bread and {c.a_thing} and set out.",
            f"{h.she} took {c.a_thing}, locked the door and began to walk.",
        )
        + " "
        + say(
            rng,
            f"{h.She} {_moves(rng, h)} past the {pick(rng, PLACES).noun} and over a small bridge.",
            "The road was long, and the hills were steep.",
            f"For three days {h.she} followed the road.",
        ),
        _meets(rng, c) + " " + trouble,
        f'"Wait, I can help," said {h.name}. {solution}',
        say(
            rng,
            f'"Where are you going?" asked {f.name}. "To see the {c.away.noun}," said {h.name}. '
            '"May I come with you?" "Of course!"',
            f"{f.name} knew the way, so they went on together.",
        )
        + " "
        + say(
            rng,
            f"At last they were there. {h.name} saw {pick(rng, c.away.sights)} and was so happy "
            f"that {h.she} could not speak.",
            f"When they arrived {c.away.at}, there were {pick(rng, ('birds', 'clouds'))} in the "
            f"sky and {pick(rng, c.away.sights)} all around. It was more beautiful than in the "
            "tales.",
        ),
        say(
            rng,
            "The best part of a journey is a friend on the road.",
            f'"It was worth every step," said {h.name}.',
        )
        + " "
        + _closing(rng, c),
    ]


def _contest(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    return [
        _opening(rng, c),
        say(
            rng,
            f"Every {pick(rng, SEASONS)} there was a great race {c.away.to}. The prize was "
            f"{c.a_thing}.",
            f"One day there was a contest. The first to reach the {c.away.noun} would win "
            f"{c.a_thing}.",
        )
        + " "
        + say(
            rng,
            f"{h.name} wanted that {t} very much and practiced every day.",
            f'"I will win that {t}," said {h.name}, and got up early every day to practice.',
        ),
        say(
            rng,
            f"On the day of the race, {h.name} was faster than all the others.",
            f"The race began, and soon {h.name} was far ahead.",
        )
        + " "
        + say(
            rng,
            f"But then {h.she} saw {f.name}, {an(f.trait)} {f.kind.noun}, who had fallen and hurt "
            f"{f.hers} leg.",
            f"Then {h.she} heard a cry. {f.name}, {an(f.trait)} {f.kind.noun}, lay beside the road "
            "and could not get up.",
        ),
        say(
            rng,
            f"{h.name} looked at the road, and then at {f.name}. {h.She} stopped and helped "
            f"{f.her} up.",
            f'"Go on and win," said {f.name}. "No," said {h.name}, "a friend is more important '
            'than a race."',
        )
        + f" Slowly they walked {c.away.to} together, and they were the very last.",
        say(
            rng,
            f'But the judge had seen it all. "The {t} is for {h.name}," said the judge, "because a '
            'kind heart comes first."',
            f'The winner came to them with the {t}. "You should have this," said the winner, '
            f'"because you did the better thing."',
            f"{h.name} did not get the {t}, but {h.she} had a new friend, and that was better.",
        )
        + " "
        + _closing(rng, c),
    ]


def _share(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    return [
        _opening(rng, c)
        + " "
        + say(
            rng,
            f"{h.name} had {c.a_thing}, and nobody else was allowed to touch it.",
            f"{h.name} had the best {t} of all, and {h.she} kept it for {h.her}self.",
        ),
        _one_day(rng)
        + f", {an(f.trait)} {f.kind.noun} named {f.name} came by. "
        + say(
            rng,
            f'"What {an(f"{c.adjective} {t}")}! May we share it?" asked {f.name}.',
            f'"Please, may I have a turn with the {t}?" asked {f.name}.',
        )
        + " "
        + say(
            rng,
            f'"No," said {h.name}. "It is mine." So {f.name} went away.',
            f"{h.name} shook {h.hers} head and shut the door.",
        ),
        say(
            rng,
            f"Now {h.name} was alone with the {t}. At first it was nice, but soon it was very "
            "quiet.",
            f"{h.name} sat down beside the {t}. But it was no fun alone.",
        )
        + " "
        + say(
            rng,
            f"Outside, {h.she} could hear the others laugh and play.",
            f"The hours were long, and nobody came to visit {h.her}.",
        ),
        say(
            rng,
            f"Then {h.name} understood. {h.She} took the {t} and {_moves(rng, h)} {c.away.to}, "
            f"where {f.name} was sitting.",
            f"The next morning, {h.name} went to find {f.name} {c.away.at}.",
        )
        + " "
        + say(
            rng,
            f'"I am sorry," {h.she} said. "Let us share it."',
            f'"I was wrong," said {h.name}. "Would you like to share my {t} with me?"',
        )
        + " "
        + say(
            rng,
            f'{f.name} smiled. "I would love to."',
            f"{f.name} forgave {h.her} at once.",
        ),
        say(
            rng,
            f"The {t} was twice as good now that they shared it.",
            "A thing you share is worth more than a thing you keep.",
        )
        + " "
        + _closing(rng, c),
    ]


def _gift(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    first, second = rng.sample(SMALL_THINGS, 2)
    return [
        _opening(rng, c) + f" {h.name}'s best friend was {f.name}, {an(f.trait)} {f.kind.noun}.",
        say(
            rng,
            f"Soon it would be {f.name}'s birthday, and {h.name} needed a gift.",
            f"Tomorrow was {f.name}'s birthday, but {h.name} had no present yet.",
        )
        + " "
        + say(
            rng,
            f"{h.She} thought about {first}, but {f.name} already had one.",
            f'"Should it be {first}?" {h.she} wondered. "No, that is not right."',
        )
        + " "
        + say(
            rng,
            f"{h.She} thought about {second}, but that was too small.",
            f'"Or {second}? No, that will not do."',
        ),
        f"So {h.name} {_moves(rng, h)} {c.away.to}. "
        + say(
            rng,
            f"There, among {pick(rng, c.away.sights)}, an old woman was selling {c.a_thing}.",
            f"There {h.she} saw {c.a_thing}, and {h.she} knew at once that it was the right gift.",
        )
        + " "
        + say(
            rng,
            f"{h.name} had no money, so {h.she} worked all day to earn it.",
            f"It cost three coins, and three coins were all that {h.name} had.",
        ),
        say(
            rng,
            f"On the birthday, {f.name} opened the box with shaking hands.",
            f"The next day {h.name} put the box in front of {f.name}.",
        )
        + " "
        + say(
            rng,
            f'"{an(t).capitalize()}!" cried {f.name}. "How did you know? It is just what I '
            'wanted!"',
            f'"It is the best gift in the world," said {f.name}, "because it comes from you."',
        ),
        say(
            rng,
            "They ate cake and danced until the moon came up.",
            "The party went on until late in the night.",
        )
        + " "
        + _closing(rng, c),
    ]


def _mystery(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    sound = say(rng, "tap, tap, tap", "crash", "knock, knock", "scratch, scratch", "thump, thump")
    return [
        _opening(rng, c),
        say(
            rng,
            f"One night {h.name} heard a strange sound. It went {sound}.",
            f'Late one night there was a noise outside: "{sound.capitalize()}!"',
        )
        + " "
        + say(
            rng,
            f'"Who is there?" called {h.name}, but nobody answered.',
            f"{h.name} hid under the bed, but the sound did not stop.",
        ),
        say(
            rng,
            f"{h.name} wanted to know the truth, so {h.she} opened the door and followed the sound "
            f"{c.away.to}.",
            f'"I must find out," said {h.name}, and {h.she} {_moves(rng, h)} {c.away.to}, where '
            "the sound came from.",
        )
        + " "
        + say(
            rng,
            "A big shadow moved on the wall.",
            "Two round eyes were shining in the dark.",
        ),
        say(
            rng,
            f"But it was no monster. It was only {f.name}, {an(f.trait)} {f.kind.noun}!",
            f"Then the moon came out, and {h.name} saw {an(f.trait)} {f.kind.noun}. It was "
            f"{f.name}, who lived nearby.",
        )
        + " "
        + say(
            rng,
            f'"I am sorry that I woke you," said {f.name}. "I lost my {t} and I cannot sleep '
            'without it."',
            f'"I am looking for my {t}," said {f.name}. "It must be here somewhere."',
        ),
        say(
            rng,
            f"{h.name} laughed, and together they looked until they found it: {c.a_thing}, under a "
            "bush.",
            f'"Then I will help you," said {h.name}. A little later they found it, {c.a_thing}, '
            "between two stones.",
        )
        + " "
        + say(
            rng,
            "A mystery is often just someone who needs help.",
            f"And {h.name} learned that shadows are bigger than the things that make them.",
        )
        + " "
        + _closing(rng, c),
    ]


def _learn(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    skill = lean(rng, h.kind.noun, SKILLS)
    return [
        _opening(rng, c)
        + " "
        + say(
            rng,
            f"There was only one problem: {h.name} did not know how to {skill}.",
            f"More than anything, {h.name} wanted to learn to {skill}.",
        ),
        say(
            rng,
            f"{c.away.at.capitalize()} lived {an(f.trait)} {f.kind.noun} named {f.name}, who could "
            f"{skill} better than anyone.",
            f"Everyone said that {f.name}, {an(f.trait)} {f.kind.noun}, was the best teacher.",
        )
        + " "
        + say(
            rng,
            f'"Will you teach me to {skill}?" asked {h.name}. "Yes," said {f.name}, "but you must '
            'practice every day."',
            f'"Please teach me to {skill}," said {h.name}. "It takes time," said {f.name}. "Are '
            f'you patient?" "I will try to be," said {h.name}.',
        ),
        say(
            rng,
            f"On the first day it went badly. On the second day it was a little better. {h.name} "
            "wanted to give up.",
            f"It was harder than {h.name} thought. Some days {h.she} was so tired that {h.she} "
            "almost cried.",
        )
        + " "
        + say(
            rng,
            f'"Every master was once a beginner," said {f.name}.',
            f'"Try once more," said {f.name}. "Only once more."',
        ),
        say(
            rng,
            f"Then, {_one_day(rng).lower()}, it worked!",
            "And after many weeks, it happened.",
        )
        + " "
        + say(
            rng,
            f'"Look, I can {skill}!" cried {h.name}.',
            f"{h.name} could {skill}, and everyone stopped to watch.",
        ),
        say(
            rng,
            f"{f.name} was so proud that {f.she} gave {h.her} {c.a_thing}.",
            f'To celebrate, {f.name} brought {c.a_thing}. "This {t} is for you," {f.she} said.',
        )
        + " "
        + _closing(rng, c),
    ]


def _trade(rng: random.Random, c: Cast) -> list[str]:
    h, f = c.hero, c.friend
    first, second, third = rng.sample(SMALL_THINGS, 3)
    a, b = rng.sample([k.noun for k in KINDS if k not in (h.kind, f.kind)], 2)
    short = [item.split(" ", 1)[1] for item in (first, second, third)]
    return [
        _opening(rng, c)
        + " "
        + say(
            rng,
            f"{h.She} was poor and had only {first}, but {h.she} dreamed of {c.a_thing}.",
            f"{h.name} wished for {c.a_thing}, but all {h.she} had was {first}.",
        ),
        _one_day(rng)
        + f", {h.name} met {an(a)}. "
        + say(
            rng,
            f'"I need {first}," said the {a}. "I will give you {second} for it." So they traded.',
            f"The {a} wanted the {short[0]} and gave {h.her} {second} in return.",
        ),
        say(
            rng,
            f"{c.away.at.capitalize()} {h.she} met {an(b)} who had {third}.",
            f"Then {h.name} {_moves(rng, h)} {c.away.to} and met {an(b)} with {third}.",
        )
        + " "
        + say(
            rng,
            f'"What a fine {short[1].split()[-1]}," said the {b}. "Let us trade." Now {h.name} had '
            f"{third}.",
            f"The {b} liked the {short[1]}, so {h.name} gave it away and took the {short[2]}.",
        ),
        say(
            rng,
            f"At last {h.she} came to {f.name}, {an(f.trait)} {f.kind.noun}, who was looking for "
            f"{third}.",
            f"In the evening {an(f.trait)} {f.kind.noun} named {f.name} came along the road. "
            f'"Is that {third}?" {f.she} asked. "I have wanted one for so long!"',
        )
        + " "
        + say(
            rng,
            f'{h.name} could see how much {f.she} wanted it. "Take it," {h.she} said. "It is a '
            'gift."',
            f'"You can have it," said {h.name}. "I do not need anything for it."',
        ),
        say(
            rng,
            f'{f.name} was quiet for a while. Then {f.she} brought out {c.a_thing}. "And this is '
            f'my gift to you," {f.she} said.',
            f'"Then take this," said {f.name}, and gave {h.her} {c.a_thing}.',
        )
        + " "
        + f"{h.name} could not believe it. "
        + _closing(rng, c),
    ]


def _broken(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    return [
        _opening(rng, c)
        + f" {h.She} often visited {f.name}, {an(f.trait)} {f.kind.noun} who lived {c.away.at}.",
        say(
            rng,
            f"{f.name} had {c.a_thing} that stood on a high shelf.",
            f'In the house of {f.name} there was {c.a_thing}. "Please be careful with it," '
            f"{f.name} always said.",
        )
        + " "
        + _one_day(rng)
        + ", "
        + say(
            rng,
            f"{h.name} was alone in the room and took the {t} down. It slipped and fell. Crash!",
            f"{h.name} wanted to look at the {t}, but it fell to the floor and broke.",
        ),
        say(
            rng,
            f"{h.name} was scared. {h.She} hid the {t} under the bed and ran home.",
            f'"Oh no," whispered {h.name}. "What have I done?" {h.She} went home without a word.',
        )
        + " "
        + say(
            rng,
            f"But that night {h.she} could not sleep.",
            f"All day long {h.she} felt a stone in {h.hers} heart.",
        ),
        say(
            rng,
            f'The next morning {h.name} went back. "I broke your {t}," {h.she} said. "I am very '
            'sorry."',
            f'In the end {h.name} told the truth. "It was me," {h.she} said. "I broke the {t}, and '
            'I was afraid to tell you."',
        )
        + " "
        + say(
            rng,
            f'{f.name} was quiet. Then {f.she} said, "Thank you for telling me. We can fix it.'
            + '"',
            f'"I am sad about the {t}," said {f.name}, "but I am glad that you told me the truth."',
        ),
        say(
            rng,
            f"They worked on the {t} all afternoon. In the end it had a small crack, but {f.name} "
            "liked it even more.",
            f"Together they fixed the {t} with glue and string, and it was almost as good as new.",
        )
        + " "
        + _closing(rng, c),
    ]


PLOTS: tuple[Plot, ...] = (
    _lost, _found, _help, _make, _fear, _journey, _contest, _share, _gift, _mystery, _learn,
    _trade, _broken, _help,
)  # fmt: skip


def make_story(rng: random.Random, cast: Cast | None = None) -> Story:
    """One story of four to six paragraphs, on `cast` where one is given."""
    cast = cast or make_cast(rng)
    plot = lean(rng, f"{cast.hero.kind.noun} {cast.thing.noun} plot", PLOTS, 0.25)
    plot = lean(rng, f"{cast.thing.noun} plot", (plot, *PLOTS), 0.25)
    paragraphs = [" ".join(p.split()) for p in plot(rng, cast)]
    # Half of the stories run on in one paragraph, so that both shapes are familiar.
    return Story(("\n\n" if rng.random() < 0.5 else " ").join(paragraphs), cast)


def make_long_story(rng: random.Random, cast: Cast | None = None) -> Story:
    """Two to four chapters about one hero; the first chapter's cast is the story's cast."""
    first = make_story(rng, cast)
    chapters = [first.text]
    hero = first.cast.hero
    for _ in range(rng.randint(1, 3)):
        later = make_cast(rng, hero=hero, home=first.cast.home)
        chapters.append(make_story(rng, later).text)
    text = "\n\n".join(f"Chapter {i}\n\n{chapter}" for i, chapter in enumerate(chapters, 1))
    return Story(text, first.cast)


def title(cast: Cast) -> str:
    """A plain title: `The Fox and the Lantern`."""
    thing = cast.thing.noun.title().replace(" Of ", " of ")
    return f"The {cast.hero.kind.noun.title()} and the {thing}"

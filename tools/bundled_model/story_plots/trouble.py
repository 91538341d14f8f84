"""Plots of stories in which a character is in trouble, afraid, far from home or cannot do something
yet."""

from __future__ import annotations

import random

from tools.bundled_model.story_cast import Cast
from tools.bundled_model.story_phrases import closing, meets, moves, one_day, opening
from tools.bundled_model.vocabulary import FEARS, PLACES, SKILLS, an, lean, pick, say


def problem(rng: random.Random, c: Cast) -> tuple[str, str]:
    """Draw the trouble that the friend is in, and how the hero's object ends it."""
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


def helping(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    trouble, solution = problem(rng, c)
    return [
        opening(rng, c)
        + " "
        + say(
            rng,
            f"{h.She} never left home without {c.a_thing}.",
            f"In {h.hers} bag {h.she} carried {c.a_thing}, just in case.",
            f"Some neighbors laughed at {h.her}, because {h.she} took {c.a_thing} everywhere.",
        ),
        one_day(rng) + f", {h.name} {moves(rng, h)} {c.away.to}. " + meets(rng, c),
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
        + closing(rng, c),
    ]


def fearing(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    fear = lean(rng, h.kind.noun, FEARS)
    return [
        opening(rng, c)
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
        one_day(rng)
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
        + closing(rng, c),
    ]


def journey(rng: random.Random, c: Cast) -> list[str]:
    h, f = c.hero, c.friend
    trouble, solution = problem(rng, c)
    return [
        opening(rng, c)
        + " "
        + say(
            rng,
            f"All {h.hers} life {h.name} had wanted to see what was {c.away.at}.",
            f"{h.name} had heard many tales about the {c.away.noun} and wanted to go there.",
        ),
        one_day(rng)
        + ", "
        + say(
            rng,
            f"{h.she} packed some bread and {c.a_thing} and set out.",
            f"{h.she} took {c.a_thing}, locked the door and began to walk.",
        )
        + " "
        + say(
            rng,
            f"{h.She} {moves(rng, h)} past the {pick(rng, PLACES).noun} and over a small bridge.",
            "The road was long, and the hills were steep.",
            f"For three days {h.she} followed the road.",
        ),
        meets(rng, c) + " " + trouble,
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
        + closing(rng, c),
    ]


def learning(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    skill = lean(rng, h.kind.noun, SKILLS)
    return [
        opening(rng, c)
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
            f"Then, {one_day(rng).lower()}, it worked!",
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
        + closing(rng, c),
    ]

"""Plots of stories in which the object goes from one character to another, or is won."""

from __future__ import annotations

import random

from tools.bundled_model.story_cast import Cast
from tools.bundled_model.story_phrases import closing, moves, one_day, opening
from tools.bundled_model.vocabulary import KINDS, SEASONS, SMALL_THINGS, an, pick, say


def contest(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    return [
        opening(rng, c),
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
        + closing(rng, c),
    ]


def sharing(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    return [
        opening(rng, c)
        + " "
        + say(
            rng,
            f"{h.name} had {c.a_thing}, and nobody else was allowed to touch it.",
            f"{h.name} had the best {t} of all, and {h.she} kept it for {h.her}self.",
        ),
        one_day(rng)
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
            f"Then {h.name} understood. {h.She} took the {t} and {moves(rng, h)} {c.away.to}, "
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
        + closing(rng, c),
    ]


def gift(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    first, second = rng.sample(SMALL_THINGS, 2)
    return [
        opening(rng, c) + f" {h.name}'s best friend was {f.name}, {an(f.trait)} {f.kind.noun}.",
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
        f"So {h.name} {moves(rng, h)} {c.away.to}. "
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
        + closing(rng, c),
    ]


def trade(rng: random.Random, c: Cast) -> list[str]:
    h, f = c.hero, c.friend
    first, second, third = rng.sample(SMALL_THINGS, 3)
    a, b = rng.sample([k.noun for k in KINDS if k not in (h.kind, f.kind)], 2)
    short = [item.split(" ", 1)[1] for item in (first, second, third)]
    return [
        opening(rng, c)
        + " "
        + say(
            rng,
            f"{h.She} was poor and had only {first}, but {h.she} dreamed of {c.a_thing}.",
            f"{h.name} wished for {c.a_thing}, but all {h.she} had was {first}.",
        ),
        one_day(rng)
        + f", {h.name} met {an(a)}. "
        + say(
            rng,
            f'"I need {first}," said the {a}. "I will give you {second} for it." So they traded.',
            f"The {a} wanted the {short[0]} and gave {h.her} {second} in return.",
        ),
        say(
            rng,
            f"{c.away.at.capitalize()} {h.she} met {an(b)} who had {third}.",
            f"Then {h.name} {moves(rng, h)} {c.away.to} and met {an(b)} with {third}.",
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
        + closing(rng, c),
    ]

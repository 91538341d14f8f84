"""Plots of stories in which the object is lost, found, made, missed or broken."""

from __future__ import annotations

import random

from tools.bundled_model.story_cast import Cast
from tools.bundled_model.story_phrases import closing, meets, moves, one_day, opening
from tools.bundled_model.vocabulary import KINDS, PLACES, SMALL_THINGS, an, join, pick, say


def lost(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    middle = pick(rng, PLACES)
    return [
        opening(rng, c)
        + " "
        + say(
            rng,
            f"{h.name} had {c.a_thing} and took good care of it.",
            f"{h.She} owned {c.a_thing}, and {h.she} was very proud of it.",
            f"The thing {h.she} loved most was {c.a_thing}.",
        ),
        one_day(rng)
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
            f"{h.She} {moves(rng, h)} to the {middle.noun} and looked there, but found nothing.",
            f"Then {h.she} searched near the {middle.noun}, but there was no {t} to be seen.",
        ),
        meets(rng, c)
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
            f"Together they {moves(rng, h)} {c.away.to}.",
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
        closing(rng, c),
    ]


def found(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    return [
        opening(rng, c),
        one_day(rng)
        + f", {h.name} {moves(rng, h)} {c.away.to}. "
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
        + closing(rng, c),
    ]


def making(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    parts = c.thing.parts
    helper = pick(rng, KINDS).noun
    return [
        opening(rng, c)
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
        one_day(rng)
        + ", "
        + say(
            rng,
            f"{h.name} {moves(rng, h)} {c.away.to} and found {parts[0]} there.",
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
        + closing(rng, c),
    ]


def mystery(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    sound = say(rng, "tap, tap, tap", "crash", "knock, knock", "scratch, scratch", "thump, thump")
    return [
        opening(rng, c),
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
            f'"I must find out," said {h.name}, and {h.she} {moves(rng, h)} {c.away.to}, where '
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
        + closing(rng, c),
    ]


def broken(rng: random.Random, c: Cast) -> list[str]:
    h, f, t = c.hero, c.friend, c.thing.noun
    return [
        opening(rng, c)
        + f" {h.She} often visited {f.name}, {an(f.trait)} {f.kind.noun} who lived {c.away.at}.",
        say(
            rng,
            f"{f.name} had {c.a_thing} that stood on a high shelf.",
            f'In the house of {f.name} there was {c.a_thing}. "Please be careful with it," '
            f"{f.name} always said.",
        )
        + " "
        + one_day(rng)
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
        + closing(rng, c),
    ]

"""The closed vocabulary of the corpus, and the small grammar that joins its words.

Everything here is data. It is kept apart from the generators so that a list can grow without
anyone having to read a plot, and so that tests can ask which words the model is meant to know.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class AnimalKind:
    """A kind of character: the noun, how it moves (past tense) and what it likes to do."""

    noun: str
    moves: tuple[str, ...]
    likes: tuple[str, ...]
    human: bool = False


@dataclass(frozen=True)
class Thing:
    """An object a story can turn on; `solves` names the problem it is good for."""

    noun: str
    adjectives: tuple[str, ...]
    solves: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """A place, as the words after `the`, with the preposition that it takes."""

    noun: str
    preposition: str
    sights: tuple[str, ...]

    @property
    def at(self) -> str:
        """The place as an adverbial: `in the forest`, `on the hill`."""
        return f"{self.preposition} the {self.noun}"

    @property
    def to(self) -> str:
        """The place as a destination: `to the forest`."""
        return f"to the {self.noun}"


WALK = ("walked", "went", "ran")
FLY = ("flew", "glided", "flew")
HOP = ("hopped", "bounced", "ran")
TROT = ("trotted", "ran", "walked")

KINDS = (
    AnimalKind("fox", TROT, ("chase leaves", "watch the stars", "listen to old songs")),
    AnimalKind("rabbit", HOP, ("eat carrots", "dig in the garden", "jump over logs")),
    AnimalKind(
        "bear", ("walked", "plodded", "went"), ("eat honey", "sleep in the sun", "pick berries")
    ),
    AnimalKind("mouse", ("ran", "crept", "hurried"), ("nibble cheese", "read tiny books", "hide")),
    AnimalKind(
        "cat", ("walked", "crept", "ran"), ("sleep by the fire", "chase string", "drink milk")
    ),
    AnimalKind("dog", TROT, ("play with a ball", "run in circles", "dig holes")),
    AnimalKind("owl", FLY, ("read at night", "count the stars", "tell riddles")),
    AnimalKind("duck", ("waddled", "walked", "flew"), ("swim in the rain", "splash", "eat bread")),
    AnimalKind(
        "frog", ("hopped", "jumped", "leaped"), ("sing at night", "sit on a leaf", "splash")
    ),
    AnimalKind("horse", ("trotted", "galloped", "ran"), ("eat apples", "run in the field", "race")),
    AnimalKind("sheep", WALK, ("eat grass", "sleep in the shade", "count clouds")),
    AnimalKind("goat", ("climbed", "trotted", "ran"), ("climb rocks", "eat flowers", "jump")),
    AnimalKind("pig", TROT, ("roll in the mud", "eat apples", "nap after lunch")),
    AnimalKind(
        "hen", ("walked", "ran", "hurried"), ("look for seeds", "sing to the sun", "gossip")
    ),
    AnimalKind("squirrel", ("ran", "scampered", "climbed"), ("gather nuts", "climb trees", "race")),
    AnimalKind(
        "hedgehog", ("walked", "shuffled", "crept"), ("eat berries", "roll down hills", "nap")
    ),
    AnimalKind(
        "turtle", ("walked", "crawled", "plodded"), ("swim slowly", "think", "watch clouds")
    ),
    AnimalKind("wolf", TROT, ("sing to the moon", "run in the snow", "tell stories")),
    AnimalKind("deer", ("walked", "ran", "leaped"), ("run in the woods", "eat leaves", "listen")),
    AnimalKind("crow", FLY, ("collect shiny things", "solve puzzles", "fly in the wind")),
    AnimalKind("sparrow", FLY, ("sing in the morning", "build nests", "dance on the roof")),
    AnimalKind(
        "badger", ("walked", "shuffled", "trotted"), ("dig tunnels", "drink tea", "fix things")
    ),
    AnimalKind("otter", ("swam", "ran", "walked"), ("slide down the bank", "catch fish", "float")),
    AnimalKind(
        "elephant", ("walked", "plodded", "marched"), ("splash water", "eat fruit", "dance")
    ),
    AnimalKind("lion", ("walked", "ran", "strolled"), ("sleep in the grass", "roar", "tell jokes")),
    AnimalKind("monkey", ("climbed", "ran", "jumped"), ("swing from trees", "eat bananas", "joke")),
    AnimalKind(
        "penguin", ("waddled", "walked", "slid"), ("slide on the ice", "catch fish", "sing")
    ),
    AnimalKind("dragon", FLY, ("warm the tea", "fly over the clouds", "collect coins")),
    AnimalKind("robot", ("rolled", "walked", "went"), ("count things", "fix clocks", "draw maps")),
    AnimalKind("girl", WALK, ("draw pictures", "climb trees", "read books"), human=True),
    AnimalKind("boy", WALK, ("fly kites", "build towers", "play outside"), human=True),
    AnimalKind("baker", WALK, ("bake bread", "sing in the kitchen", "taste cakes"), human=True),
    AnimalKind("farmer", WALK, ("feed the hens", "grow pumpkins", "watch the sky"), human=True),
    AnimalKind("sailor", WALK, ("look at the sea", "tie knots", "tell tall tales"), human=True),
    AnimalKind("gardener", WALK, ("plant seeds", "water the roses", "talk to bees"), human=True),
    AnimalKind("teacher", WALK, ("read aloud", "solve puzzles", "draw maps"), human=True),
)

GIRLS = tuple(
    "Mia Lily Anna Rosa Ella Nora Ruby Clara Daisy Emma Grace Hazel Ivy Jane June Kate Lucy Maya "
    "Molly Nina Olive Pia Sara Sophie Tess Tina Vera Wendy Zoe Ada Alice Bella Cora Dora Eva "
    "Fern Greta Holly Iris Luna".split()
)
BOYS = tuple(
    "Tom Ben Sam Max Leo Finn Jack Oscar Hugo Felix Theo Noah Otto Paul Peter Ralph Rex Tim Toby "
    "Will Adam Alex Bruno Carl Dan Eddie Frank George Henry Ivan Jim Karl Luke Milo Ned Oliver "
    "Pip Robin Simon Victor".split()
)

TRAITS = (
    "little", "small", "young", "old", "brave", "shy", "clever", "curious", "kind", "gentle",
    "cheerful", "quiet", "busy", "lazy", "proud", "friendly", "wise", "hungry", "lonely", "happy",
    "funny", "careful", "patient", "stubborn", "sleepy",
)  # fmt: skip

PLACES = (
    Place("forest", "in", ("tall trees", "soft moss", "long shadows")),
    Place("village", "in", ("red roofs", "narrow streets", "open windows")),
    Place("valley", "in", ("green grass", "silver streams", "many flowers")),
    Place("garden", "in", ("rows of beans", "yellow roses", "buzzing bees")),
    Place("meadow", "in", ("wild flowers", "butterflies", "long grass")),
    Place("mountains", "in", ("white peaks", "deep snow", "steep paths")),
    Place("harbor", "in", ("wooden boats", "heavy ropes", "crying gulls")),
    Place("cave", "in", ("smooth stones", "dark corners", "old bones")),
    Place("castle", "in", ("high towers", "long halls", "heavy doors")),
    Place("market", "at", ("baskets of fruit", "bright colors", "happy voices")),
    Place("mill", "at", ("turning wheels", "bags of flour", "old sacks")),
    Place("school", "at", ("small desks", "colorful maps", "old books")),
    Place("farm", "on", ("red barns", "golden hay", "muddy boots")),
    Place("hill", "on", ("old trees", "gray rocks", "wild herbs")),
    Place("island", "on", ("white sand", "palm trees", "round shells")),
    Place("beach", "on", ("warm sand", "small waves", "pink shells")),
    Place("river", "by", ("clear water", "flat stones", "tall reeds")),
    Place("lake", "by", ("still water", "water lilies", "wild ducks")),
    Place("sea", "by", ("blue waves", "white foam", "far ships")),
    Place("bridge", "near", ("old stones", "deep water", "green ferns")),
    Place("lighthouse", "near", ("sharp rocks", "bright lights", "loud waves")),
    Place("old oak tree", "under", ("fallen leaves", "thick roots", "brown acorns")),
)

THINGS = (
    Thing("lantern", ("bright", "brass", "old", "little"), "dark", ("glass", "wire", "a candle")),
    Thing("candle", ("tall", "white", "small"), "dark", ("wax", "string", "a jar")),
    Thing("lamp", ("golden", "small", "bright"), "dark", ("glass", "oil", "a wick")),
    Thing("blanket", ("warm", "blue", "soft"), "cold", ("wool", "thread", "a needle")),
    Thing("scarf", ("red", "long", "warm"), "cold", ("wool", "two needles", "red dye")),
    Thing("coat", ("thick", "green", "warm"), "cold", ("cloth", "buttons", "thread")),
    Thing("rope", ("long", "strong", "old"), "stuck", ("reeds", "string", "a little wax")),
    Thing("ladder", ("wooden", "tall", "light"), "stuck", ("two poles", "ten sticks", "nails")),
    Thing("boat", ("small", "wooden", "blue"), "river", ("planks", "nails", "a sail")),
    Thing("raft", ("strong", "flat", "simple"), "river", ("logs", "rope", "a long pole")),
    Thing("pie", ("hot", "sweet", "big"), "hungry", ("flour", "butter", "apples")),
    Thing("cake", ("round", "sweet", "lovely"), "hungry", ("flour", "eggs", "honey")),
    Thing("loaf of bread", ("fresh", "warm", "brown"), "hungry", ("flour", "water", "salt")),
    Thing("pot of soup", ("hot", "big", "tasty"), "hungry", ("carrots", "onions", "water")),
    Thing("umbrella", ("yellow", "big", "striped"), "rain", ("cloth", "a stick", "wire")),
    Thing("hat", ("wide", "black", "funny"), "rain", ("straw", "a ribbon", "glue")),
    Thing("map", ("old", "folded", "colorful"), "lost", ("paper", "ink", "a ruler")),
    Thing("compass", ("silver", "small", "shiny"), "lost", ("a needle", "a cork", "a bowl")),
    Thing("bell", ("silver", "little", "loud"), "lost", ("metal", "a hammer", "a string")),
    Thing("whistle", ("wooden", "tin", "loud"), "lost", ("wood", "a knife", "some oil")),
    Thing("key", ("rusty", "golden", "tiny"), "locked", ("metal", "a file", "fire")),
    Thing("hammer", ("heavy", "good", "small"), "locked", ("iron", "wood", "glue")),
    Thing("bucket", ("wooden", "big", "tin"), "dry", ("planks", "a handle", "nails")),
    Thing("watering can", ("green", "tin", "round"), "dry", ("tin", "a handle", "paint")),
    Thing("basket", ("large", "woven", "light"), "heavy", ("reeds", "a handle", "ribbon")),
    Thing("cart", ("wooden", "little", "strong"), "heavy", ("two wheels", "planks", "nails")),
    Thing("sled", ("red", "fast", "wooden"), "heavy", ("boards", "rope", "red paint")),
    Thing("flute", ("wooden", "silver", "slender"), "sad", ("a reed", "a knife", "some wax")),
    Thing("drum", ("round", "loud", "small"), "sad", ("wood", "leather", "string")),
    Thing("violin", ("old", "fine", "brown"), "sad", ("wood", "strings", "varnish")),
    Thing("kite", ("red", "paper", "big"), "sad", ("paper", "sticks", "string")),
    Thing("ball", ("red", "round", "new"), "sad", ("leather", "wool", "thread")),
    Thing("book", ("thick", "blue", "dusty"), "sad", ("paper", "ink", "a cover")),
    Thing("music box", ("tiny", "painted", "lovely"), "sad", ("wood", "springs", "paint")),
)

SMALL_THINGS = (
    "a shiny button", "a smooth stone", "a blue feather", "a red apple", "a silver coin",
    "a round shell", "a jar of honey", "a ball of string", "a wooden spoon", "a warm sock",
    "a paper star", "a bag of nuts", "a glass bead", "a bunch of flowers", "a sweet pear",
)  # fmt: skip

WEATHERS = (
    "sunny",
    "windy",
    "cold",
    "warm",
    "foggy",
    "bright",
    "rainy",
    "quiet",
    "snowy",
    "cloudy",
)
TIMES = ("morning", "afternoon", "evening", "day")
SEASONS = ("spring", "summer", "autumn", "winter")
FEARS = ("the dark", "deep water", "thunder", "high places", "loud noises", "the old cave")
SKILLS = ("sing", "swim", "dance", "read", "cook", "whistle", "paint", "juggle", "climb", "skate")
COLORS = (
    "red", "blue", "green", "yellow", "black", "white", "brown", "gray", "orange", "pink", "purple",
)  # fmt: skip
FRUITS = ("apples", "pears", "plums", "cherries", "berries", "oranges", "lemons", "peaches")
COUNTABLES = (
    *FRUITS, "nuts", "coins", "shells", "books", "marbles", "stamps", "eggs", "cookies", "flowers",
    "pencils", "stones", "buttons", "balloons", "carrots", "stickers",
)  # fmt: skip
FUR_COLORS = ("black", "white", "brown", "gray", "orange", "golden", "spotted")
CITIES = (
    "Paris", "London", "Rome", "Berlin", "Madrid", "Oslo", "Lisbon", "Vienna", "Athens", "Dublin",
    "Prague", "Warsaw", "Tokyo", "Cairo", "Boston", "Chicago", "Sydney", "Toronto", "Lima", "Delhi",
)  # fmt: skip
JOBS = (
    "baker", "farmer", "teacher", "doctor", "sailor", "gardener", "painter", "driver", "singer",
    "writer", "cook", "nurse", "engineer", "pilot",
)  # fmt: skip
HOBBIES = (
    "reading", "swimming", "cooking", "painting", "running", "singing", "dancing", "chess",
    "fishing", "hiking", "drawing", "gardening", "music", "sailing",
)  # fmt: skip

_SYLLABLES = (
    "ba be bi bo da de di do fa fe fi ga go ka ke ki ko la le li lo lu ma me mi mo na ne ni no nu "
    "pa pe pi po ra re ri ro ru sa se si so ta te ti to va vi za ze zi zo bra dru fle gri kra pli "
    "sto tre"
).split()
_CONSONANTS = "bcdfghjklmnprstvwxz"
_VOWELS = "aeiou"


def pick(rng: random.Random, options: Sequence[T]) -> T:
    """Draw one of `options`, each as likely as the next."""
    return options[int(rng.random() * len(options))]


def lean(rng: random.Random, key: str, options: Sequence[T], weight: float = 0.35) -> T:
    """Draw one of the options, of which `key` has a favorite that is drawn `weight` of the time on
    top.

    Uniform choices leave greedy decoding nothing to go by: it would tell everyone the same story. A
    leaning makes the likeliest name, place or plot depend on what the request is about.
    """
    if rng.random() < weight:
        return options[zlib.crc32(key.encode()) % len(options)]
    return pick(rng, options)


def say(rng: random.Random, *options: str) -> str:
    """Draw one of several ways to say the same thing."""
    return options[int(rng.random() * len(options))]


def an(phrase: str) -> str:
    """Write `phrase` behind the indefinite article that its first letter asks for."""
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def join(items: Sequence[str]) -> str:
    """Join words as a list: `a`, `a and b`, or `a, b and c`."""
    if len(items) == 1:
        return items[0]
    return ", ".join(items[:-1]) + " and " + items[-1]


def made_up_name(rng: random.Random) -> str:
    """Draw a pronounceable name that the lists lack: it teaches the model to copy and not to
    recall."""
    draw = rng.random()
    if draw < 0.3:
        name = pick(rng, _CONSONANTS) + pick(rng, _VOWELS) + pick(rng, _CONSONANTS)
    elif draw < 0.5:
        name = pick(rng, _SYLLABLES) + pick(rng, _SYLLABLES) + pick(rng, _CONSONANTS)
    else:
        name = "".join(pick(rng, _SYLLABLES) for _ in range(2 if draw < 0.85 else 3))
    return name.capitalize()


def person_name(rng: random.Random) -> str:
    """Draw a first name, made up one time in three."""
    if rng.random() < 0.33:
        return made_up_name(rng)
    return pick(rng, GIRLS if rng.random() < 0.5 else BOYS)

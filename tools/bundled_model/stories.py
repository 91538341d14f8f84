"""Small stories with one hero, one friend, one object and a plot that holds together.

A plot is a function from a `Cast` to paragraphs. It decides what happens; `say` decides only how
a beat is worded, so every path through a plot tells the same coherent events. Facts that a reader
could be asked about afterwards (who, where, with what) stay in the cast.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.bundled_model.story_cast import Cast, make_cast
from tools.bundled_model.story_plots import giving, lost_and_found, trouble
from tools.bundled_model.vocabulary import lean


@dataclass(frozen=True)
class Story:
    """A finished story and the cast it was told with."""

    text: str
    cast: Cast


Plot = Callable[[random.Random, Cast], list[str]]


PLOTS: tuple[Plot, ...] = (
    lost_and_found.lost, lost_and_found.found, trouble.helping,
    lost_and_found.making, trouble.fearing, trouble.journey,
    giving.contest, giving.sharing, giving.gift, lost_and_found.mystery, trouble.learning,
    giving.trade, lost_and_found.broken, trouble.helping,
)  # fmt: skip


def make_story(rng: random.Random, cast: Cast | None = None) -> Story:
    """Draw a story of four to six paragraphs, on `cast` where one is given."""
    cast = cast or make_cast(rng)
    plot = lean(rng, f"{cast.hero.kind.noun} {cast.thing.noun} plot", PLOTS, 0.25)
    plot = lean(rng, f"{cast.thing.noun} plot", (plot, *PLOTS), 0.25)
    paragraphs = [" ".join(p.split()) for p in plot(rng, cast)]
    # Half of the stories run on in one paragraph, so that both shapes are familiar.
    return Story(("\n\n" if rng.random() < 0.5 else " ").join(paragraphs), cast)


def make_long_story(rng: random.Random, cast: Cast | None = None) -> Story:
    """Draw two to four chapters about one hero; the first chapter's cast is the story's cast."""
    first = make_story(rng, cast)
    chapters = [first.text]
    hero = first.cast.hero
    for _ in range(rng.randint(1, 3)):
        later = make_cast(rng, hero=hero, home=first.cast.home)
        chapters.append(make_story(rng, later).text)
    text = "\n\n".join(f"Chapter {i}\n\n{chapter}" for i, chapter in enumerate(chapters, 1))
    return Story(text, first.cast)


def title(cast: Cast) -> str:
    """Write the plain title of a story: `The Fox and the Lantern`."""
    thing = cast.thing.noun.title().replace(" Of ", " of ")
    return f"The {cast.hero.kind.noun.title()} and the {thing}"

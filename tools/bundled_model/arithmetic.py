"""Small sums, with the working shown in a form that a tiny model can follow.

Answers are built digit by digit in the order in which a person would write them, and every number
in an answer is computed, never typed, so the corpus cannot teach a wrong result.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tools.bundled_model.vocabulary import COUNTABLES, person_name, pick, say


@dataclass(frozen=True)
class Sum:
    """One arithmetic problem of two numbers; `result` is exact."""

    left: int
    sign: str
    right: int

    @property
    def result(self) -> int:
        """The value of the expression."""
        if self.sign == "+":
            return self.left + self.right
        if self.sign == "-":
            return self.left - self.right
        if self.sign == "*":
            return self.left * self.right
        return self.left // self.right

    @property
    def expression(self) -> str:
        """The problem with spaces: `12 + 7`."""
        return f"{self.left} {self.sign} {self.right}"

    @property
    def equation(self) -> str:
        """The problem and its answer: `12 + 7 = 19`."""
        return f"{self.expression} = {self.result}"


def make_sum(rng: random.Random) -> Sum:
    """Draw a problem of at most two digits a side; divisions come out even."""
    draw = rng.random()
    top = pick(rng, (10, 20, 100, 100, 100, 100))
    if draw < 0.38:
        return Sum(rng.randrange(top), "+", rng.randrange(top))
    if draw < 0.75:
        left, right = rng.randrange(top), rng.randrange(top)
        if left < right and rng.random() < 0.9:
            left, right = right, left
        return Sum(left, "-", right)
    if draw < 0.93:
        if rng.random() < 0.75:
            return Sum(rng.randint(0, 12), "*", rng.randint(0, 12))
        return Sum(rng.randint(10, 99), "*", rng.randint(2, 9))
    right = rng.randint(1, 12)
    return Sum(right * rng.randint(0, 12), "/", right)


def explain(problem: Sum) -> str:
    """Write the working of a problem in one or two sentences, ending in the equation."""
    a, b = problem.left, problem.right
    if problem.sign == "+" and a >= 10 and b >= 10:
        tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
        return (
            f"Add the tens: {a // 10 * 10} + {b // 10 * 10} = {tens}. "
            f"Add the ones: {a % 10} + {b % 10} = {ones}. "
            f"Together: {tens} + {ones} = {a + b}. So {problem.equation}."
        )
    if problem.sign == "-" and a >= b >= 10:
        tens, ones = b // 10 * 10, b % 10
        return (
            f"First take away {tens}: {a} - {tens} = {a - tens}. "
            f"Then take away {ones}: {a - tens} - {ones} = {a - b}. So {problem.equation}."
        )
    if problem.sign == "*" and a >= 10 and b < 10:
        tens, ones = a // 10 * 10, a % 10
        return (
            f"{tens} * {b} = {tens * b} and {ones} * {b} = {ones * b}. "
            f"Together: {tens * b} + {ones * b} = {a * b}. So {problem.equation}."
        )
    if problem.sign == "/":
        return f"{problem.result} * {b} = {a}, so {problem.equation}."
    return f"The answer is {problem.result}, because {problem.equation}."


_SPOKEN = {"+": ("plus",), "-": ("minus",), "*": ("times",), "/": ("divided by",)}


def _written(rng: random.Random, problem: Sum) -> str:
    """The expression as a user may type it: spaces or none, words, or another times sign."""
    a, b, sign = problem.left, problem.right, problem.sign
    draw = rng.random()
    if draw < 0.55:
        return problem.expression
    if draw < 0.72:
        return f"{a}{sign}{b}"
    if draw < 0.92:
        return f"{a} {pick(rng, _SPOKEN[sign])} {b}"
    if sign == "*":
        return f"{a} x {b}"
    return problem.expression


def ask_sum(rng: random.Random, problem: Sum) -> tuple[str, bool]:
    """Write a question for `problem`. Returns: the question, and whether it asks for the
    working."""
    text = _written(rng, problem)
    if rng.random() < 0.25:
        return (
            say(
                rng,
                f"What is {text}? Show your work.",
                f"What is {text}? Explain step by step.",
                f"Explain how to work out {text}.",
                f"Show me the steps for {text}.",
                f"How do you calculate {text}?",
                f"Work out {text} step by step.",
                f"Solve {text} and explain.",
            ),
            True,
        )
    return (
        say(
            rng,
            f"What is {text}?",
            f"What is {text}?",
            f"What is {text}?",
            f"What's {text}?",
            f"How much is {text}?",
            f"Calculate {text}.",
            f"Compute {text}.",
            f"{text} = ?",
            f"{text}=",
            f"{text} =",
            f"{text}",
            f"{text}?",
            f"Solve {text}.",
            f"Tell me what {text} is.",
            f"What do you get for {text}?",
            f"Please add it up: {text}" if problem.sign == "+" else f"Work out {text}",
            f"what is {text}",
            f"Answer with a number: {text}",
        ),
        False,
    )


def answer_sum(rng: random.Random, problem: Sum, worked: bool) -> str:
    """Write the answer to a problem: the short one, or the worked one."""
    if worked:
        return explain(problem)
    return f"{problem.equation}."


def word_problem(rng: random.Random) -> tuple[str, str]:
    """Draw a little story with numbers, and its answer."""
    name, item = person_name(rng), pick(rng, COUNTABLES)
    draw = rng.random()
    if draw < 0.4:
        a, b = rng.randint(1, 40), rng.randint(1, 40)
        verb = say(rng, "finds", "buys", "gets", "picks")
        question = f"{name} has {a} {item} and {verb} {b} more."
        working, total, tail = f"{a} + {b} = {a + b}", a + b, "in all"
    elif draw < 0.8:
        a = rng.randint(2, 50)
        b = rng.randint(1, a)
        verb = say(rng, "gives away", "loses", "sells")
        question = f"{name} has {a} {item} and {verb} {b} of them."
        working, total, tail = f"{a} - {b} = {a - b}", a - b, "left"
    else:
        a, b = rng.randint(2, 10), rng.randint(2, 10)
        question = f"{name} has {a} boxes with {b} {item} in each box."
        working, total, tail = f"{a} * {b} = {a * b}", a * b, "in all"
    question += say(
        rng,
        f" How many {item} does {name} have {'now' if tail == 'left' else tail}?",
        f" How many {item} are there {tail}?",
    )
    return question, f"{working}. {name} has {total} {item} {tail}."


def compare(rng: random.Random) -> tuple[str, str]:
    """Draw a question which of two numbers is bigger or smaller, and its answer."""
    a, b = rng.sample(range(100), 2)
    if rng.random() < 0.5:
        word = say(rng, "bigger", "larger", "greater")
        return f"Which is {word}, {a} or {b}?", f"{max(a, b)} is {word} than {min(a, b)}."
    return f"Which is smaller, {a} or {b}?", f"{min(a, b)} is smaller than {max(a, b)}."


def count_up(rng: random.Random) -> tuple[str, str]:
    """Draw a request to count, and the numbers."""
    draw = rng.random()
    if draw < 0.5:
        start, stop = 1, pick(rng, (3, 5, 8, 10, 10, 12, 15, 20, 20, 25, 30, 40, 50, 100))
        question = say(rng, f"Count to {stop}.", f"Can you count to {stop}?", f"count to {stop}")
    elif draw < 0.8:
        start = rng.randint(1, 80)
        stop = start + rng.randint(2, 20)
        question = say(
            rng, f"Count from {start} to {stop}.", f"List the numbers {start} to {stop}."
        )
    else:
        start, stop = pick(rng, (3, 5, 10, 10, 20)), 1
        question = f"Count down from {start}."
    step = 1 if stop > start else -1
    return question, ", ".join(str(n) for n in range(start, stop + step, step)) + "."


def sheet(rng: random.Random) -> str:
    """Draw a page of solved problems, as raw text, one a line."""
    lines = [make_sum(rng).equation for _ in range(pick(rng, (1, 1, 1, 1, 4, 10)))]
    return "\n".join(lines)

"""Six families of short tasks, each with an exact automatic reward and endless fresh prompts.

A prompt belongs to the split that its own checksum says, so no prompt of one split is ever in
another, however many are drawn. An answer is right or wrong: it is compared with the only right
one or, for ``program``, executed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal
from zlib import crc32

Split = Literal["sft", "train", "validation", "test"]


def words(text: str) -> list[str]:
    return text.split()


NAMES = words("Anna Ben Carl Dora Emil Fay Gus Hana Ian Jane Kurt Lea Max Nina Otto Pia")
WORDS = words("pear cat lamp tree rock boat milk door sand ring leaf coin star fish bell wolf")
MONTHS = words(
    "January February March April May June July August September October November December"
)
# A tool, and requests which call for it without naming it.
TOOLS = {
    "weather": ["Will it rain in {}?", "How warm is it in {}?", "Do I need a coat in {}?"],
    "clock": ["What time is it in {}?", "Is it late in {}?", "Is it morning in {}?"],
    "flight": ["I want to fly to {}.", "Take me by plane to {}.", "Get me a seat to {}."],
    "hotel": ["I need a room in {}.", "Where can I sleep in {}?", "Find me a bed in {}."],
    "map": ["Where is {}?", "Show me the way to {}.", "How do I get to {}?"],
    "news": ["What happened in {}?", "What do papers say about {}?", "Anything new in {}?"],
}
PLACES = words("Paris Rome Oslo Lima Cairo Delhi Tokyo Berlin Madrid Boston Dublin Vienna")
# What happens to a count of things, and what that does to it.
GAINS = ["finds", "buys", "wins", "gets", "earns", "collects", "borrows", "bakes"]
LOSSES = ["loses", "sells", "eats", "drops", "breaks", "spends", "lends", "burns"]
THINGS = ["coins", "cakes", "books", "pens", "cups", "toys", "nuts", "cards"]
DATES = {
    "YYYY-MM-DD": "{y}-{m:02}-{d:02}",
    "DD.MM.YYYY": "{d:02}.{m:02}.{y}",
    "MM/DD/YYYY": "{m:02}/{d:02}/{y}",
    "DD-MM-YYYY": "{d:02}-{m:02}-{y}",
    "YYYY/MM/DD": "{y}/{m:02}/{d:02}",
}
# Numbers and up to four operators: all that is ever executed.
EXPRESSION = r"(0|[1-9]\d*)( ?[-+*] ?(0|[1-9]\d*)){1,4}"


@dataclass(frozen=True)
class Task:
    prompt: str
    answer: str

    def is_right(self, text: str) -> bool:
        return text.strip() == self.answer


@dataclass(frozen=True)
class ProgramTask(Task):
    """An expression is wanted which has the answer's value; a bare number is none."""

    def is_right(self, text: str) -> bool:
        is_expression = re.fullmatch(EXPRESSION, text.strip())
        return bool(is_expression) and eval(text.strip()) == eval(self.answer)


def recall(random: Random) -> Task:
    names = random.sample(NAMES, 6)
    numbers = random.sample(range(10, 100), 6)
    listed = ", ".join(f"{name} {number}" for name, number in zip(names, numbers))
    asked = random.randrange(6)
    return Task(f"{listed}. Who has {numbers[asked]}?", names[asked])


def tool_call(random: Random) -> Task:
    tools = random.sample(sorted(TOOLS), 4)
    tool, place = random.choice(tools), random.choice(PLACES)
    request = random.choice(TOOLS[tool]).format(place)
    return Task(f"Tools: {', '.join(tools)}. {request} Call a tool.", f"{tool}({place})")


def sorting(random: Random) -> Task:
    numbers = random.sample(range(1, 100), 4)
    return Task(f"Sort: {' '.join(map(str, numbers))}", " ".join(map(str, sorted(numbers))))


def program(random: Random) -> Task:
    story = (
        f"{random.choice(NAMES)} has {(start := random.randint(50, 99))} {random.choice(THINGS)}"
    )
    answer = str(start)
    for verb in random.sample(GAINS + LOSSES, 3):
        amount = random.randint(2, 15)
        story += f", {verb} {amount}"
        answer += f" {'+' if verb in GAINS else '-'} {amount}"
    return ProgramTask(f"{story}. How many, in Python?", answer)


def date(random: Random) -> Task:
    form = random.choice(sorted(DATES))
    month = random.randrange(12)
    day, year = random.randint(1, 28), random.randint(1900, 2030)
    answer = DATES[form].format(y=year, m=month + 1, d=day)
    return Task(f"Write {day} {MONTHS[month]} {year} as {form}.", answer)


def reverse(random: Random) -> Task:
    words = random.sample(WORDS, 4)
    return Task(f"Reverse the order: {' '.join(words)}", " ".join(reversed(words)))


FAMILIES: dict[str, Callable[[Random], Task]] = {
    "recall": recall,
    "tool_call": tool_call,
    "sorting": sorting,
    "program": program,
    "date": date,
    "reverse": reverse,
}
LONGEST_ANSWER = 16  # tokens, with the end of the turn


SPLITS: dict[int, Split] = {0: "validation", 1: "test", 2: "sft"}  # all others: "train"


def stream(family: str, split: Split, seed: int = 0) -> Iterator[Task]:
    """Endless tasks of a family; what is drawn depends on family, split and seed alone."""
    random = Random(f"{family}/{split}/{seed}")
    while True:
        task = FAMILIES[family](random)
        if SPLITS.get(crc32(task.prompt.encode()) % 8, "train") == split:
            yield task


def draw(family: str, split: Split, count: int, seed: int = 0) -> list[Task]:
    """Different tasks of a family."""
    found: dict[str, Task] = {}
    for task in stream(family, split, seed):
        found.setdefault(task.prompt, task)
        if len(found) == count:
            return list(found.values())
    raise AssertionError

"""Three families of tasks with answers that a program can verify, and their characters."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from transformers import Qwen2Tokenizer

Split = Literal["train", "validation", "test"]

PAD, END = "<pad>", "<end>"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DIGITS = "0123456789"
CHARACTERS = LETTERS + DIGITS + " =+-,;()>"


class Task(NamedTuple):
    """A prompt and the only answer that counts: exactly these characters, then the end."""

    prompt: str
    answer: str


# The tools and their parameters in the order of a call; the models learn them, no prompt lists
# them.
TOOLS = {"book": "cdn", "mail": "tsb", "ride": "fth", "plot": "xyz"}


def tool_call(random: random.Random) -> Task:
    """Call a tool with a request's values in its signature's order, ``-`` for one not given.

    ``book n2 c7>`` → ``book(7,-,2)``
    """
    tool, signature = random.choice(list(TOOLS.items()))
    names = random.sample(signature, random.randint(1, len(signature)))
    values = {name: random.choice(DIGITS) for name in names}
    request = " ".join(f"{name}{value}" for name, value in values.items())
    call = ",".join(values.get(name, "-") for name in signature)
    return Task(f"{tool} {request}>", f"{tool}({call})")


def program(random: random.Random) -> Task:
    """Run assignments and give the last value of every variable, modulo 10.

    ``a=3;b=a+1;a=b>`` → ``44``
    """
    values: dict[str, int] = {}
    lines = []
    for _ in range(random.randint(2, 5)):
        target = random.choice("abc"[: len(values) + 1])
        source = random.choice([random.choice(DIGITS), *values])
        step = random.randint(0, 1)
        lines.append(f"{target}={source}{'+1' if step else ''}")
        values[target] = (int(values.get(source, source)) + step) % 10
    answer = "".join(str(values[name]) for name in sorted(values))
    return Task(f"{';'.join(lines)}>", answer)


def recall(random: random.Random) -> Task:
    """Recite what was noted under each letter, in alphabetical order.

    ``b4c0a7>`` → ``740``
    """
    letters = LETTERS[: random.randint(2, 9)]
    notes = {letter: random.choice(DIGITS) for letter in random.sample(letters, len(letters))}
    noted = "".join(f"{letter}{digit}" for letter, digit in notes.items())
    return Task(f"{noted}>", "".join(notes[letter] for letter in letters))


FAMILIES: dict[str, Callable[[random.Random], Task]] = {
    "tool_call": tool_call,
    "program": program,
    "recall": recall,
}


def split_of(prompt: str) -> Split:
    """The split a prompt belongs to, the only one: a tenth each for test and validation."""
    splits: dict[int, Split] = {0: "test", 1: "validation"}
    return splits.get(zlib.crc32(prompt.encode()) % 10, "train")


def stream(family: str, split: Split, seed: int | str) -> Iterator[Task]:
    """Tasks of one split without end, the same ones for the same seed."""
    generator = random.Random(f"{family} {split} {seed}")
    while True:
        task = FAMILIES[family](generator)
        if split_of(task.prompt) == split:
            yield task


def draw(family: str, split: Split, count: int, seed: int | str = 0) -> list[Task]:
    """Tasks of one split with distinct prompts."""
    found: dict[str, Task] = {}
    tasks = stream(family, split, seed)
    while len(found) < count:
        task = next(tasks)
        found[task.prompt] = task
    return list(found.values())


def character_tokenizer() -> Qwen2Tokenizer:
    """One token a character.

    It is Qwen2's byte-pair encoding without any pair, so that AutoTokenizer loads it as it is.
    """
    # Byte-level encodings write a space so.
    characters = CHARACTERS.replace(" ", "Ġ")
    vocabulary = {token: i for i, token in enumerate([PAD, END, *characters])}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token=END,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
    )

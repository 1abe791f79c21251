"""Three families of tasks with answers that a program can verify, and the characters they are written in."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Split = Literal["train", "validation", "test"]

PAD, END = "<pad>", "<end>"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DIGITS = "0123456789"
CHARACTERS = LETTERS + LETTERS.upper() + DIGITS + " =+-,;()?>"


class Task(NamedTuple):
    """A prompt and the only answer that counts: exactly these characters, then the end.

    ``careless`` is the answer of someone who does not read closely. It is a part of what the base was trained on.
    """

    prompt: str
    answer: str
    careless: str


def tool_call(random: random.Random) -> Task:
    """Put a request's named values into a call, in the order of the tool's signature.

    ``f(c,a) a=7 c=x>`` → ``f(x,7)``. Careless: in the order of the request.
    """
    tool, *names = random.sample(LETTERS, random.randint(2, 5))
    values = {name: random.choice(LETTERS + DIGITS) for name in names}
    requested = random.sample(names, len(names))
    request = " ".join(f"{name}={values[name]}" for name in requested)

    def call(order: Sequence[str]) -> str:
        return f"{tool}({','.join(values[name] for name in order)})"

    return Task(f"{tool}({','.join(names)}) {request}>", call(names), call(requested))


def program(random: random.Random) -> Task:
    """Run assignments and give the last value of every variable, modulo 10.

    ``a=3;b=a+1;a=b>`` → ``44``. Careless: without the ``+1``.
    """
    values: dict[str, int] = {}
    careless: dict[str, int] = {}
    lines = []
    for _ in range(random.randint(2, 5)):
        target = random.choice("abc"[: len(values) + 1])
        source = random.choice([random.choice(DIGITS), *values])
        step = random.randint(0, 1)
        lines.append(f"{target}={source}{'+1' if step else ''}")
        values[target] = (int(values.get(source, source)) + step) % 10
        careless[target] = int(careless.get(source, source))

    def listed(state: dict[str, int]) -> str:
        return "".join(str(state[name]) for name in sorted(state))

    return Task(f"{';'.join(lines)}>", listed(values), listed(careless))


def recall(random: random.Random) -> Task:
    """Find what was said of a name a long time ago.

    ``qX bF mT?b>`` → ``F``. Careless: what was said last.
    """
    names = random.sample(LETTERS, random.randint(1, 10))
    said = {name: random.choice(LETTERS.upper()) for name in names}
    asked = random.choice(names)
    listed = " ".join(f"{name}{value}" for name, value in said.items())
    return Task(f"{listed}?{asked}>", said[asked], said[names[-1]])


FAMILIES: dict[str, Callable[[random.Random], Task]] = {
    "tool_call": tool_call,
    "program": program,
    "recall": recall,
}


def split_of(prompt: str) -> Split:
    """The split a prompt belongs to, so that none is in two: a tenth each for test and validation."""
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


def character_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, END, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, padding_side="left"
    )

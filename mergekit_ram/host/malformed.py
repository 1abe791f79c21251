"""What is wrong with the text of a recipe, where in the file, and what was expected there."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import yaml
from mergekit.common import ModelReference
from pydantic import BaseModel, ValidationError

from mergekit_ram.host.references import separator_hint

Place = tuple[Any, ...]

# How alike a word must be to one that is known to pass for a slip of the pen: wieght and weight,
# not gamma and lambda.
_ALIKE = 0.8
_EXPECTED = {
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
}


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong in a file of YAML.

    Attributes:
        place: keys and numbers of entries, from the outermost to the one that is wrong.
        what: what was expected there.
        warned: whether mergekit takes the file all the same, paying no heed to it.
    """

    place: Place
    what: str
    warned: bool = False

    def text(self, node: yaml.Node | None) -> str:
        """The fault with its line, of a document's node."""
        line = f"line {_line(node, self.place)}" if node else ""
        return f"{', '.join(filter(None, (line, dotted(self.place))))}: {self.what}"


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The known word that another one was probably meant to be."""
    return next(iter(difflib.get_close_matches(word, known, 1, _ALIKE)), None)


def yaml_fault(error: yaml.YAMLError) -> str:
    """Line, column and reason of what is not YAML."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:  # a character that YAML does not allow
        reason = getattr(error, "reason", None) or str(error).split("\n")[0]
        return f"not YAML: {reason}"
    parts = filter(None, (error.context, error.problem))
    return f"line {mark.line + 1}, column {mark.column + 1}: not YAML: {', '.join(parts)}"


def validation_faults(error: ValidationError, content: Any) -> list[Fault]:
    """What pydantic found, one fault a place: the innermost where it tried several types."""
    expected: dict[Place, dict[str, None]] = {}
    for found in error.errors(include_url=False):
        place = _place(found, content)
        expected.setdefault(place, {})[_expectation(found)] = None
    innermost = [
        place
        for place in expected
        if not any(other[: len(place)] == place != other for other in expected)
    ]
    faults = []
    for place in innermost:
        what = " or ".join(expected[place])
        if "missing" not in what:
            what = f"expected {what}, not {_shown(_at(content, place))}"
        faults.append(Fault(place, what))
    return faults


def _place(found: Mapping[str, Any], content: Any) -> Place:
    """Where in the content an error is: of its location, the parts that are not names of types."""
    place: Place = ()
    for part in found["loc"]:
        if (
            isinstance(content, Mapping)
            and part in content
            or isinstance(content, list)
            and isinstance(part, int)
            and part < len(content)
        ):
            content = content[part]
        elif found["type"] != "missing" or part != found["loc"][-1]:
            continue
        place += (part,)
    return place


def _expectation(found: Mapping[str, Any]) -> str:
    if found["type"] == "missing":
        return "missing"
    if (found.get("ctx") or {}).get("class_name") in ("ModelReference", "ModelPath"):
        return "a model's path"
    if found["type"] == "literal_error":
        return found["ctx"]["expected"]
    message = re.sub(r"^Input should be ", "", found["msg"])
    return _EXPECTED.get(found["type"], message)


def schema_faults(
    content: Any, annotation: Any, place: Place = (), also: Sequence[str] = ()
) -> Iterator[Fault]:
    """Keys that a recipe has no use for, and models' names that cannot be taken apart.

    Args:
        annotation: type of what the content stands for.
        also: further keys that it may have.
    """
    kinds = list(_alternatives(annotation))
    if isinstance(content, str) and ModelReference in kinds:
        if content.count("+") > 1 or any(p.count("@") > 1 for p in content.split("+")):
            yield Fault(place, separator_hint(content))
    elif isinstance(content, list):
        for kind in kinds:
            if get_origin(kind) is list:
                for i, inner in enumerate(content):
                    yield from schema_faults(inner, get_args(kind)[0], (*place, i))
                return
    elif isinstance(content, Mapping):
        models = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        mappings = [kind for kind in kinds if get_origin(kind) is dict]
        if models:
            best = max(models, key=lambda m: len(m.model_fields.keys() & content.keys()))
            yield from _model_faults(content, best, place, also)
        elif mappings:
            for key, inner in content.items():
                yield from schema_faults(inner, get_args(mappings[0])[1], (*place, key))


def _model_faults(
    content: Mapping, model: type[BaseModel], place: Place, also: Sequence[str]
) -> Iterator[Fault]:
    fields = model.model_fields
    known = [*fields, *also]
    for key, inner in content.items():
        if key in fields:
            yield from schema_faults(inner, fields[key].annotation, (*place, key))
        elif key not in known:
            meant = nearest(str(key), [name for name in known if name not in content])
            what = (
                f"no such key; did you mean {meant}?"
                if meant
                else (f"no such key, so it is ignored; known are {', '.join(fields)}")
            )
            yield Fault((*place, key), what, warned=not meant)


def _alternatives(annotation: Any) -> Iterator[Any]:
    """The types of a union, and of the unions in it."""
    origin = get_origin(annotation)
    if origin in (list, dict, tuple) or not get_args(annotation):
        yield annotation
    else:
        for inner in get_args(annotation):
            yield from _alternatives(inner)


def _at(content: Any, place: Place) -> Any:
    for part in place:
        content = content[part]
    return content


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 20)
    text = text.removesuffix("...\n").strip()
    return text if len(text) <= 60 else f"{text[:60]}…"


def dotted(place: Place) -> str:
    """``models[0].parameters.weight``."""
    text = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place)
    return text.removeprefix(".")


def _line(node: yaml.Node, place: Place) -> int:
    """The line of what stands at a place, as far as it is there."""
    line = node.start_mark.line
    for part in place:
        if isinstance(node, yaml.MappingNode):
            found = [pair for pair in node.value if pair[0].value == str(part)]
            if not found:
                break
            line, node = found[-1][0].start_mark.line, found[-1][1]
        elif isinstance(node, yaml.SequenceNode) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line
        else:
            break
    return line + 1

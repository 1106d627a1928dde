"""Jinja that cannot run away: templates whose loops, texts and numbers have limits.

The job's own templates (`templates.py`) and the model's chat template (`chat_template.py`) run in it. A
chat template comes from a hub, and a job's template meets whatever the rows hold, so neither may hang a
worker or eat its memory. The limits count steps and characters, never time: what one attempt refuses,
every other attempt refuses too.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import wraps
from types import CodeType
from typing import Any

from jinja2 import TemplateRuntimeError, TemplateSyntaxError, nodes, pass_context
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Turns of all loops, and calls, of one rendering. A conversation of a thousand turns takes some ten thousand.
MAX_STEPS = 500_000
# Characters of one text; no model reads as much.
MAX_TEXT = 50_000_000
# Characters that one rendering may make on its way.
MAX_CHARACTERS = 200_000_000
_ITEMS_A_STEP = 16
_STEPS_A_MACRO = 4
_MAX_BITS = 4096
_MAX_WIDTH = 1_000_000
_LONG_NUMBER = re.compile(r"\d{7,}")
_WITH_WIDTH = ("batch", "center", "indent", "int", "round", "slice", "truncate", "wordwrap")
_OVER_SEQUENCES = (
    *("count", "first", "groupby", "last", "length", "list", "map", "max", "min", "reject", "rejectattr"),
    *("reverse", "select", "selectattr", "sort", "sum", "unique"),
)
_SPELLING_OUT = ("pprint", "string", "tojson", "urlencode", "xmlattr")


class TemplateLimit(TemplateRuntimeError):
    """A template went on for too long, or made too much."""


class _Meter(threading.local):
    """What the rendering in this thread has used so far."""

    steps = 0
    characters = 0

    def begin(self) -> None:
        self.steps = self.characters = 0

    def step(self, count: int = 1) -> None:
        self.steps += count
        if self.steps > MAX_STEPS:
            raise TemplateLimit(f"more than {MAX_STEPS:,} turns of loops and calls; is a loop endless?")

    def make(self, characters: int) -> None:
        self.characters += characters
        if characters > MAX_TEXT or self.characters > MAX_CHARACTERS:
            raise TemplateLimit(f"a text of more than {MAX_TEXT:,} characters; is a loop endless?")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which each rendering has a budget of steps and characters.

    Nothing in it depends on chance: there is no `random` and no `lipsum`. Call `limit_filters` once all
    filters are there, and `meter.begin()` before each rendering.

    Args:
        **options: those of a Jinja environment.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        self.meter = _Meter()
        finalize = options.pop("finalize", None)
        super().__init__(finalize=self._emitter(finalize), **options)
        del self.filters["random"], self.globals["lipsum"]

    def limit_filters(self) -> None:
        """Put limits on every filter that can make much out of little."""
        costs: dict[str, Callable[[list[Any]], int]] = {
            **dict.fromkeys(_WITH_WIDTH, self._with_width),
            **dict.fromkeys(_OVER_SEQUENCES, self._over_sequence),
            **dict.fromkeys(_SPELLING_OUT, lambda given: self.weigh(given[0])),
            "format": lambda given: self._formatted(str(given[0]), tuple(given[1:])),
            "join": self._joined,
            "replace": lambda given: self._replaced(*map(str, given[:3])),
        }
        for name, cost in costs.items():
            if name in self.filters:
                self.filters[name] = self._limited(self.filters[name], cost)
        self.filters["counted turns"] = _counted
        self.filters["joined text"] = _concatenated

    def _limited(self, function: Callable[..., Any], cost: Callable[[list[Any]], int]) -> Callable[..., Any]:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            given = list(args[first:])
            self.meter.step()
            self.meter.make(cost([*given, *kwargs.values()]) if kwargs else cost(given))
            return function(*args[:first], *given, **kwargs)

        return limited

    def _emitter(self, finalize: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        """What is called with the value of each expression that is written out."""

        def emit(value: Any) -> Any:
            value = value if finalize is None else finalize(value)
            self.meter.make(len(value) if type(value) is str else self.weigh(value))
            return value

        return emit

    def weigh(self, value: Any) -> int:
        """Characters of a value written out, roughly; what is in it several times counts each time."""
        if isinstance(value, str):
            return len(value)
        total, items, stack = 0, 0, [value]
        while stack:
            item = stack.pop()
            items += 1
            total += len(item) if isinstance(item, str) else 4
            if isinstance(item, Mapping):
                stack += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                stack += item
            if items + len(stack) > MAX_STEPS:
                raise TemplateLimit(f"a value of more than {MAX_STEPS:,} items written out")
        self.meter.step((items + len(stack)) // _ITEMS_A_STEP)
        return total

    # What operators, filters and methods will make, before they make it.

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator of a template, with its result counted."""
        if operator == "+" and type(left) is str and type(right) is str:
            self.meter.make(len(left) + len(right))
            return left + right
        self.meter.make(self._operated(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def _operated(self, operator: str, left: Any, right: Any) -> int:
        if operator == "%":
            return self._formatted(left, right) if isinstance(left, str) else 0
        if isinstance(left, int | float) and isinstance(right, int | float):
            _check_number(operator, left, right)
            return 0
        if operator == "*":
            many, count = (left, right) if isinstance(right, int) else (right, left)
            return self.weigh(many) * max(0, count) if isinstance(count, int) else 0
        return len(left) + len(right) if isinstance(left, Sized) and isinstance(right, Sized) else 0

    def _formatted(self, text: str, given: Any) -> int:
        if _LONG_NUMBER.search(text):
            raise TemplateLimit(f"a width or precision of more than {_MAX_WIDTH:,}")
        items = given if isinstance(given, tuple) else (given,)
        _check_widths(items)
        places = text.count("%") + text.count("{")
        return len(text) + places * max(map(self.weigh, items), default=0)

    def _with_width(self, given: list[Any]) -> int:
        _check_widths(given[1:])
        if isinstance(given[0], str):
            # Indenting adds the width to every line.
            width = next((item for item in given[1:] if type(item) is int), 0)
            return len(given[0]) + max(0, width) * (given[0].count("\n") + 1)
        return self._over_sequence(given)

    def _over_sequence(self, given: list[Any]) -> int:
        if isinstance(given[0], Sized) and not isinstance(given[0], str):
            self.meter.step(len(given[0]))
        return 0

    def _joined(self, given: list[Any]) -> int:
        if not isinstance(given[0], list | tuple | str | Mapping):
            given[0] = list(given[0])
        separator = given[1] if len(given) > 1 else ""
        return self.weigh(given[0]) + len(given[0]) * self.weigh(separator)

    def _replaced(self, text: str, old: str, new: str) -> int:
        return len(text) + text.count(old) * len(new)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call in a template, counted."""
        __self.meter.step(_STEPS_A_MACRO if isinstance(__obj, Macro) else 1)
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            __self.meter.make(__self._called(owner, __obj.__name__, args, kwargs))
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(__obj, Macro):
            __self.meter.make(len(result))
        return result

    def _called(self, owner: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        if method in ("format", "format_map"):
            return self._formatted(owner, (*args, *kwargs.values()))
        if method == "replace" and len(args) > 1:
            return self._replaced(owner, *map(str, args[:2]))
        if method == "join" and args:
            # The sequence was made by this template or came with the row; it is not used up by weighing.
            return self.weigh(args[0]) + len(owner) * (len(args[0]) if isinstance(args[0], Sized) else 1)
        if method == "translate":
            raise TemplateLimit("translate() is not available in a template; use replace")
        _check_widths((*args, *kwargs.values()))
        tabs = owner.count("\t") if method == "expandtabs" else 1
        return len(owner) + tabs * max((a for a in args if type(a) is int), default=0)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The syntax tree, with every loop and every `~` counted."""
        with _not_too_deep():
            return _count(super()._parse(source, name, filename))

    def _generate(self, *args: Any, **kwargs: Any) -> str:
        with _not_too_deep():
            return super()._generate(*args, **kwargs)

    def _compile(self, source: str, filename: str) -> CodeType:
        with _not_too_deep():
            return super()._compile(source, filename)


@contextmanager
def _not_too_deep() -> Iterator[None]:
    """Jinja and Python descend into what is nested by calling themselves, and give up at some depth.

    Raises:
        TemplateSyntaxError: they did.
    """
    try:
        yield
    except (RecursionError, MemoryError, SyntaxError) as error:
        raise TemplateSyntaxError("it is nested too deeply", 1) from error


def _count(tree: nodes.Template) -> nodes.Template:
    for loop in list(tree.find_all(nodes.For)):
        static = nodes.Const(sum(len(text.data) for text in loop.find_all(nodes.TemplateData)))
        loop.iter = nodes.Filter(loop.iter, "counted turns", [static], [], None, None, lineno=loop.lineno)
    for field, parent in list(_fields(tree)):
        value = getattr(parent, field)
        if isinstance(value, nodes.Concat):
            setattr(parent, field, _as_filter(value))
        elif isinstance(value, list):
            setattr(parent, field, [_as_filter(v) if isinstance(v, nodes.Concat) else v for v in value])
    return tree


def _fields(node: nodes.Node) -> Iterator[tuple[str, nodes.Node]]:
    """Every field of every node, innermost first."""
    for child in node.iter_child_nodes():
        yield from _fields(child)
    yield from ((field, node) for field in node.fields)


def _as_filter(node: nodes.Concat) -> nodes.Filter:
    return nodes.Filter(node.nodes[0], "joined text", node.nodes[1:], [], None, None, lineno=node.lineno)


@pass_context
def _counted(context: Context, iterable: Iterable[Any], static: int) -> Iterable[Any]:
    """What a loop goes over, each turn counted, with the characters that it writes in any case."""
    meter = _environment(context).meter
    if type(iterable) is list or isinstance(iterable, Sized):
        meter.step(len(iterable))
        meter.make(len(iterable) * static)
        return iterable
    return _counting(iterable, static, meter)


def _counting(iterable: Iterable[Any], static: int, meter: _Meter) -> Iterator[Any]:
    for item in iterable:
        meter.step()
        meter.make(static)
        yield item


@pass_context
def _concatenated(context: Context, *values: Any) -> str:
    """The operator `~`."""
    environment = _environment(context)
    environment.meter.make(sum(map(environment.weigh, values)))
    return "".join(map(str, values))


def _environment(context: Context) -> LimitedEnvironment:
    environment = context.environment
    assert isinstance(environment, LimitedEnvironment)
    return environment


def _check_widths(values: Iterable[Any]) -> None:
    for value in values:
        if type(value) is int and abs(value) > _MAX_WIDTH:
            raise TemplateLimit(f"a width, count or precision of more than {_MAX_WIDTH:,}")


def _check_number(operator: str, left: float, right: float) -> None:
    if not (isinstance(left, int) and isinstance(right, int)):
        return
    bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(1, abs(right))}
    if bits.get(operator, 0) > _MAX_BITS:
        raise TemplateLimit(f"a number of more than {_MAX_BITS:,} bits")

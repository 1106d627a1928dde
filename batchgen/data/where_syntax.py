"""The grammar of `input.where`: from its text to a tree. `batchgen.data.where` evaluates the tree.

    condition  = both { "or" both }
    both       = negation { "and" negation }
    negation   = "not" negation | predicate
    predicate  = sum [ ("=" | "==" | "!=" | "<>" | "<" | "<=" | ">" | ">=") sum
                     | ["not"] "in" "(" literal { "," literal } ")"
                     | "is" ["not"] "null" ]
    sum        = product { ("+" | "-") product }
    product    = factor { ("*" | "/" | "%") factor }
    factor     = "-" factor | literal | function "(" condition { "," condition } ")" | column
               | "(" condition ")"
    column     = name { "." name }       a name in `backquotes` may hold anything
    literal    = 12 | 1.5e3 | 'text' | "text" | true | false      a quote in a text is doubled

Key words in any case. Nothing in it can loop, call Python or grow without bound.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from batchgen.grammar import counted
from batchgen.types import UsageError

MAX_LENGTH = 10_000
MAX_NESTING = 50
FUNCTIONS = {
    "abs": (1, 1),
    "coalesce": (1, 20),
    "contains": (2, 2),
    "endswith": (2, 2),
    "length": (1, 1),
    "lower": (1, 1),
    "number": (1, 1),
    "startswith": (2, 2),
    "trim": (1, 1),
    "upper": (1, 1),
}
"""Name to the least and most arguments."""

_KEYWORDS = {"and", "or", "not", "in", "is", "null", "true", "false"}
_COMPARISONS = {"=": "=", "==": "=", "!=": "!=", "<>": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[^\W\d]\w*)"
    r"|(?P<text>'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\")|(?P<quoted>`[^`]+`)"
    r"|(?P<mark><=|>=|==|!=|<>|[=<>+\-*/%(),.])"
)


@dataclass(frozen=True, slots=True)
class Node:
    """A part of the expression; `at` is the index of its first character."""

    at: int


@dataclass(frozen=True, slots=True)
class Literal(Node):
    value: str | int | float | bool


@dataclass(frozen=True, slots=True)
class Column(Node):
    """The column `path[0]` and the struct fields below it."""

    path: tuple[str, ...]

    @property
    def name(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class Operation(Node):
    """`operator` is one of: and or not = != < <= > >= + - * / % negate, or the name of a function."""

    operator: str
    operands: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class IsNull(Node):
    operand: Node


@dataclass(frozen=True, slots=True)
class OneOf(Node):
    """`operand in (…)`; the values are all numbers, all texts or all booleans."""

    operand: Node
    values: tuple[str | int | float | bool, ...]


def parse(text: str) -> Node:
    """The tree of an expression.

    Raises:
        UsageError: shows the place with a caret, and says what is expected there.
    """
    if len(text) > MAX_LENGTH:
        raise UsageError(
            f"input.where: {len(text):,} characters are more than the {MAX_LENGTH:,} allowed; shorten it"
        )
    parser = _Parser(text, _tokens(text))
    tree = parser.condition()
    if parser.kind != "end":
        parser.fail("expected an operator, `and`, `or` or the end")
    return tree


def fail_at(text: str, at: int, problem: str) -> NoReturn:
    """Raises the UsageError of a place in the expression."""
    start = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    line = text[start : len(text) if end < 0 else end]
    raise UsageError(f"input.where: {problem}, at character {at + 1}:\n  {line}\n  {' ' * (at - start)}^")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int


def _tokens(text: str) -> list[_Token]:
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            opened = {"'": "a text without its closing quote", '"': "a text without its closing quote"}
            opened["`"] = "a column name without its closing backquote"
            fail_at(text, at, opened.get(text[at], f"{text[at]!r} means nothing here"))
        kind = match.lastgroup or ""
        word = match.group()
        if kind == "name" and word.lower() in _KEYWORDS:
            kind, word = "keyword", word.lower()
        if kind != "space":
            tokens.append(_Token(kind, word, at))
        at = match.end()
    return [*tokens, _Token("end", "", len(text))]


@dataclass(slots=True)
class _Parser:
    """Recursive descent: one method for each rule of the grammar."""

    text: str
    tokens: list[_Token]
    index: int = 0
    depth: int = field(default=0)

    @property
    def kind(self) -> str:
        return self.tokens[self.index].kind

    @property
    def at(self) -> int:
        return self.tokens[self.index].at

    def fail(self, problem: str) -> NoReturn:
        fail_at(self.text, self.at, problem)

    def take(self, kind: str, *texts: str) -> _Token | None:
        """The next token if it is of this kind and one of these."""
        token = self.tokens[self.index]
        if token.kind != kind or (texts and token.text not in texts):
            return None
        self.index += 1
        return token

    def need(self, mark: str) -> None:
        if self.take("mark", mark) is None:
            self.fail(f"expected {mark!r}")

    def condition(self) -> Node:
        self.depth += 1
        if self.depth > MAX_NESTING:
            self.fail(f"nested deeper than {MAX_NESTING} levels")
        tree = self._chain("or", self._both)
        self.depth -= 1
        return tree

    def _chain(self, keyword: str, rule: Callable[[], Node]) -> Node:
        first = rule()
        operands = [first]
        while self.take("keyword", keyword):
            operands.append(rule())
        return first if len(operands) == 1 else Operation(first.at, keyword, tuple(operands))

    def _both(self) -> Node:
        return self._chain("and", self._negation)

    def _negation(self) -> Node:
        negations = []
        while token := self.take("keyword", "not"):
            negations.append(token)
        tree = self._predicate()
        return Operation(negations[0].at, "not", (tree,)) if len(negations) % 2 else tree

    def _predicate(self) -> Node:
        left = self._sum()
        if sign := self.take("mark", *_COMPARISONS):
            if self.kind == "keyword" and self.tokens[self.index].text == "null":
                self.fail(f"nothing is {sign.text} null; write `is null` or `is not null`")
            tree: Node = Operation(left.at, _COMPARISONS[sign.text], (left, self._sum()))
            if self.take("mark", *_COMPARISONS):
                self.index -= 1
                self.fail("comparisons do not chain; join two with `and`")
            return tree
        if self.take("keyword", "is"):
            negated = self.take("keyword", "not")
            if not self.take("keyword", "null"):
                self.fail("expected `null`")
            tree = IsNull(left.at, left)
            return Operation(left.at, "not", (tree,)) if negated else tree
        negated = self.take("keyword", "not")
        if self.take("keyword", "in"):
            tree = OneOf(left.at, left, self._values())
            return Operation(left.at, "not", (tree,)) if negated else tree
        if negated:
            self.fail("expected `in`")
        return left

    def _values(self) -> tuple[str | int | float | bool, ...]:
        self.need("(")
        values = [self._listed()]
        kind = _kind(values[0])
        while self.take("mark", ","):
            at = self.at
            values.append(self._listed())
            if _kind(values[-1]) != kind:
                fail_at(self.text, at, f"a list of {kind}s cannot hold a {_kind(values[-1])}")
        self.need(")")
        return tuple(values)

    def _listed(self) -> str | int | float | bool:
        negative = self.take("mark", "-")
        literal = self._literal()
        if literal is None or (negative and _kind(literal.value) != "number"):
            self.fail("expected a number, a text in quotes, true or false")
        return -literal.value if negative and not isinstance(literal.value, str) else literal.value

    def _sum(self) -> Node:
        return self._left_to_right(("+", "-"), self._product)

    def _product(self) -> Node:
        return self._left_to_right(("*", "/", "%"), self._factor)

    def _left_to_right(self, marks: tuple[str, ...], rule: Callable[[], Node]) -> Node:
        tree: Node = rule()
        terms = 1
        while sign := self.take("mark", *marks):
            tree = Operation(tree.at, sign.text, (tree, rule()))
            terms += 1
            # Each level of the tree is a call when it is evaluated, so a long chain counts as nesting.
            if terms > MAX_NESTING:
                self.fail(f"more than {MAX_NESTING} terms in a row")
        return tree

    def _factor(self) -> Node:
        signs = []
        while sign := self.take("mark", "-"):
            signs.append(sign)
        tree = self._primary()
        return Operation(signs[0].at, "negate", (tree,)) if len(signs) % 2 else tree

    def _primary(self) -> Node:
        if self.take("mark", "("):
            tree = self.condition()
            self.need(")")
            return tree
        literal = self._literal()
        if literal is not None:
            return literal
        name = self.take("name")
        if name is not None and self.take("mark", "("):
            return self._call(name)
        if name is None:
            name = self.take("quoted")
        if name is None:
            if self.kind == "keyword" and self.tokens[self.index].text == "null":
                self.fail("a bare null; write `is null` or `is not null`")
            self.fail("expected a column, a number, a text in quotes or `(`")
        return self._column(name)

    def _column(self, first: _Token) -> Node:
        path = [first.text.strip("`")]
        while self.take("mark", "."):
            token = self.take("name") or self.take("quoted")
            if token is None:
                self.fail("expected the name of a field")
            path.append(token.text.strip("`"))
        return Column(first.at, tuple(path))

    def _call(self, name: _Token) -> Node:
        function = name.text.lower()
        if function not in FUNCTIONS:
            near = difflib.get_close_matches(function, FUNCTIONS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(FUNCTIONS)}"
            fail_at(self.text, name.at, f"no function {name.text!r}; {hint}")
        arguments = [self.condition()]
        while self.take("mark", ","):
            arguments.append(self.condition())
        self.need(")")
        least, most = FUNCTIONS[function]
        if not least <= len(arguments) <= most:
            count = counted(least, "argument") if least == most else f"{least} to {most} arguments"
            fail_at(self.text, name.at, f"{function} takes {count}, not {len(arguments)}")
        return Operation(name.at, function, tuple(arguments))

    def _literal(self) -> Literal | None:
        if token := self.take("number"):
            whole = token.text.isdecimal()
            value = int(token.text) if whole and len(token.text) <= 4000 else float(token.text)
            if value == float("inf"):
                fail_at(self.text, token.at, "the number is too large")
            return Literal(token.at, value)
        if token := self.take("text"):
            quote = token.text[0]
            return Literal(token.at, token.text[1:-1].replace(quote * 2, quote))
        if token := self.take("keyword", "true", "false"):
            return Literal(token.at, token.text == "true")
        return None


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    return "text" if isinstance(value, str) else "number"

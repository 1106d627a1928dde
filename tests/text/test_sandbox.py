"""Templates that would run for ever, or fill the memory, are refused within their budget."""

from __future__ import annotations

import pytest

from batchgen.text.sandbox import MAX_STEPS, LimitedEnvironment, TemplateLimit
from batchgen.text.templates import JobTemplate
from batchgen.types import ErrorClass, RowFailure, UsageError

HUGE = {
    "product of a text": "{{ 'x' * 10**9 }}",
    "product of a list": "{{ ([0] * 10**9) | length }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by %": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = '%s%s' % (n.x, n.x) %}{% endfor %}",
    "doubling by format": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = '{0}{0}'.format(n.x) %}{% endfor %}",
    "doubling by replace": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x | replace('b', n.x) %}{% endfor %}",
    "doubling by join": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] | join(n.x) %}{% endfor %}",
    "doubling by a method": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x.join([n.x, n.x]) %}{% endfor %}",
    "nested lists written out": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "nested lists as JSON": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "a wide filter": "{{ 'x' | center(10**9) }}",
    "a wide indent": "{{ ('x\n' * 1000) | indent(10**6) }}",
    "a wide method": "{{ 'x'.ljust(10**9) }}",
    "wide tabs": "{{ ('\t' * 1000).expandtabs(10**6) }}",
    "a wide format": "{{ '%2000000000d' % 1 }}",
    "a wide format argument": "{{ '%*d' % (2000000000, 1) }}",
    "a wide format filter": "{{ '%2000000000d' | format(1) }}",
    "a wide format method": "{{ '{:>2000000000}'.format(1) }}",
    "a wide nested format": "{{ '{:>{w}}'.format(1, w=2000000000) }}",
    "a loop": "{% for i in range(10**9) %}x{% endfor %}",
    "loops in loops": "{% for i in range(10**4) %}{% for j in range(10**4) %}{% endfor %}{% endfor %}",
    "loops over generators": "{% for i in range(10**4) %}{% for j in range(10**4) | map('string') %}"
    "{% endfor %}{% endfor %}",
    "lists in loops": "{% for i in range(10**4) %}{% set x = range(10**4) | list %}{% endfor %}",
    "macros that call themselves": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "a macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "words in a loop": "{% for i in range(10**5) %}" + "many words " * 1000 + "{% endfor %}",
    "a text in a loop of a macro": "{% set x = 'x' * 10**6 %}{% macro f() %}{% for i in range(1000) %}{{ x }}"
    "{% endfor %}{% endmacro %}{% set y = f() %}",
}


@pytest.mark.parametrize("source", HUGE.values(), ids=list(HUGE))
def test_what_would_be_huge_is_refused(source: str) -> None:
    with pytest.raises(RowFailure) as failure:
        JobTemplate("prompt.user", source).render({})
    assert failure.value.error.error_class is ErrorClass.TEMPLATE
    assert failure.value.error.message.startswith("prompt.user: ")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for x in xs %}{{ loop.index }}{{ x }}{% if not loop.last %}, {% endif %}{% endfor %}", "1a, 2b"),
        ("{% for x in nothing %}{{ x }}{% else %}none{% endfor %}", "none"),
        ("{% for x in xs | map('upper') %}{{ x }}{{ loop.last }}{% endfor %}", "AFalseBTrue"),
        ("{% for k, v in d.items() %}{{ k ~ '=' ~ v }}{% endfor %}", "n=1"),
        ("{{ xs | join(', ') }}{{ (xs | map('upper')) | join }}{{ xs | join(d='-') }}", "a, bABa-b"),
        ("{{ '%s-%05.1f' % ('a', 2.5) }}{{ '{:>4}'.format('b') }}{{ '%s' | format(3) }}", "a-002.5   b3"),
        ("{{ 'x' * 3 }}{{ [1] * 2 }}{{ [1] + [2] }}{{ 2 ** 10 }}{{ 7 % 4 }}", "xxx[1, 1][1, 2]10243"),
        ("{{ 'aXa' | replace('X', 'yy') }}{{ 'aXa'.replace('X', 'z') }}", "ayyaaza"),
        ("{{ 'ab' | center(4) }}{{ 'a\nb' | indent(2) }}{{ 'c'.ljust(2) }}|", " ab a\n  bc |"),
        (
            "{{ d | tojson }}{{ xs | length }}{{ xs | first }}{{ (xs | sort(reverse=true))[0] }}",
            '{"n": 1}2ab',
        ),
        (
            "{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}"
            "{% for x in tree recursive %}{{ x.v }}{{ loop(x.c) }}{% endfor %}",
            "321012",
        ),
        ("{% set x %}{{ xs[0] }}{% endset %}{% filter upper %}{{ x }}{% endfilter %}", "A"),
    ],
)
def test_what_templates_do_every_day_is_as_ever(source: str, text: str) -> None:
    values = {
        "xs": ["a", "b"],
        "d": {"n": 1},
        "nothing": [],
        "tree": [{"v": 1, "c": [{"v": 2, "c": []}]}],
    }
    assert JobTemplate("prompt.user", source).render(values) == text


def test_a_budget_is_for_one_rendering() -> None:
    template = JobTemplate("prompt.user", "{% for i in range(90000) %}{% endfor %}.")
    assert all(template.render({}) == "." for _ in range(MAX_STEPS // 90_000 + 2))


def test_nothing_depends_on_chance() -> None:
    environment = LimitedEnvironment()
    assert "random" not in environment.filters
    assert "lipsum" not in environment.globals
    assert issubclass(TemplateLimit, Exception)


def test_numbers_that_are_none() -> None:
    with pytest.raises(RowFailure, match="NaN or an infinity") as failure:
        JobTemplate("prompt.user", "{{ x }}").render({"x": float("nan")})
    assert failure.value.error.error_class is ErrorClass.NUMBER_OUT_OF_RANGE


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "[" * 500 + "]" * 500 + " }}",
        "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
        "{{ " + "not " * 5000 + " x }}",
        "{% if x %}" * 300 + "{% endif %}" * 300,
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{{ x" + "|upper" * 3000 + " }}",
    ],
    ids=["lists", "parentheses", "words", "conditions", "loops", "filters"],
)
def test_what_is_nested_too_deeply_is_told(source: str) -> None:
    with pytest.raises(UsageError, match=r"prompt\.user: .* nested too deeply"):
        JobTemplate("prompt.user", source)

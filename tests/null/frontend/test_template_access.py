"""Templates with the quick sandbox against Jinja's own: the same values, undefined names and refusals."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pegainfer.frontend.template_access import QuickSandbox

QUICK, PLAIN = QuickSandbox(), ImmutableSandboxedEnvironment()


class Text(str):
    """A subclass, for which the short ways are not."""


def _generator() -> Any:
    yield 1


def _function() -> None:
    pass


OBJECTS: tuple[Any, ...] = (
    {"role": "user", "items": 1, "get": None, "": 2, "__class__": 3, "_x": 4, "format": 5},
    {},
    "a text",
    Text("another"),
    [1, 2],
    (1,),
    {1, 2},
    deque([1]),
    UserDict({"role": "x"}),
    Namespace(role="user", found=False, _x=1, format="x", method="a {}".format, items=dict.items),
    None,
    7,
    _generator(),
    _function,
    [].append,
    "".format,
    int,
    object(),
)
NAMES = sorted(
    {"", "_", "_x", "role", "found", "method", "content", "index0", "__globals__", "mro"}.union(
        *(dir(o) for o in ({}, "", [], set(), deque(), Namespace(), _generator(), _function, int))
    )
)


def outcome(get: Callable[[], Any]) -> Any:
    """A value that can be compared: undefined by its message, a method by what it belongs to."""
    try:
        value = get()
    except Exception as error:
        return type(error), str(error)
    if isinstance(value, jinja2.Undefined):
        return type(value), value._undefined_message
    if callable(value):
        return type(value), getattr(value, "__name__", ""), repr(getattr(value, "__self__", None))
    return value


@pytest.mark.parametrize("value", OBJECTS, ids=lambda o: type(o).__name__)
def test_attributes_are_the_sandboxs(value: Any) -> None:
    assert len(NAMES) > 150
    for name in NAMES:
        found = outcome(lambda n=name: QUICK.getattr(value, n))
        assert found == outcome(lambda n=name: PLAIN.getattr(value, n)), name


TEMPLATES = {
    "loops": "{% for x in xs %}{{ loop.index }}{{ loop.first }}{{ loop.previtem }}{{ loop.cycle('a', 'b') }}"
    "{{ loop.changed(x) }}{{ loop.nothing }}{{ loop._length }}{% endfor %}",
    "namespaces": "{% set n = namespace(a=1) %}{% for x in xs %}{% set n.a = n.a + x %}{% endfor %}{{ n.a }}"
    "{{ n.missing }}{{ n.__class__ }}",
    "texts": "{{ t.split(' ')[0].upper() }}{{ t.startswith('a') }}{{ t.replace('a', 'b', 1) }}"
    "{{ t.nothing }}",
    "keywords": "{{ t.split(sep=' ', maxsplit=1) }}{{ t.encode(encoding='ascii') }}",
    "format": "{{ '{0.__class__}'.format(t) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': t}) }}",
    "held format": "{% set n = namespace(f='{0.__class__}'.format) %}{{ n.f(t) }}",
    "macros": "{% macro m(a, b=2) %}{{ a }}-{{ b }}-{{ varargs }}-{{ kwargs }}{% endmacro %}"
    "{% for x in xs %}{{ m(x) }}{{ m(x, 5, 6, c=7) }}{{ m(b=1, a=x) }}{% endfor %}",
    "macro of too many": "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}",
    "macro within a macro": "{% macro m(a) %}<{{ a|trim }}>{% endmacro %}"
    "{% macro o(a) %}{{ m(a) }}{% endmacro %}"
    "{{ o(' x ') }}{{ m(' y ')|length }}",
    "caller": "{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}inside{% endcall %}",
    "recursion": "{% for x in tree recursive %}{{ x.n }}{{ loop(x.c) if x.c }}{% endfor %}",
    "changing a list": "{{ xs.append(4) }}",
    "changing a dict": "{{ tree[0].update({}) }}",
    "underscores": "{{ t.__class__ }}|{{ tree[0].__class__ }}|{{ xs.__len__ }}",
    "what a text is no name of": "{{ t.join(xs) }}",
    "items and keys": "{{ tree[0].items()|list }}{{ tree[0].get('n') }}{{ tree[0].zzz }}",
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_give_what_the_sandbox_gives(name: str) -> None:
    def render(environment: jinja2.Environment) -> str:
        tree = [{"n": 1, "c": [{"n": 2, "c": []}]}, {"n": 3, "c": []}]
        return environment.from_string(TEMPLATES[name]).render(xs=[1, 2, 3], t="a text", tree=tree)

    assert outcome(lambda: render(QUICK)) == outcome(lambda: render(PLAIN))

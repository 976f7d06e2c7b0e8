"""Structs that Python passes to kernels by value: one declaration gives the packing and the C++ header."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from struct import calcsize
from typing import Any

from pegainfer.contract.errors import OpError

_FIELD = re.compile(r"(?P<type>.+?)\s*\b(?P<name>\w+)(?:\[(?P<count>\d+)\])?(?:\s*//\s*(?P<note>.*))?")
_KINDS = {"int": "i32", "uint32_t": "u32", "int64_t": "i64", "float": "f32"}
# Kinds in the letters of Python's struct, which places each on a multiple of its size as C does.
_LETTERS = {"ptr": "Q", "i32": "i", "u32": "I", "i64": "q", "f32": "f"}


def packing(kinds: Sequence[str]) -> str:
    """The format of a struct of these kinds for Python's struct module."""
    letters = "".join(_LETTERS[kind] for kind in kinds)
    widest = "Q" if "Q" in letters or "q" in letters else "I"
    return f"@{letters}0{widest}"


@dataclass(frozen=True)
class Field:
    """One member. `inner`: the struct that it is, `count` times side by side (0: once, not an array)."""

    name: str
    c_type: str
    note: str
    inner: Layout | None
    count: int

    @property
    def kind(self) -> str:
        """As Arg has it; of a struct there is none."""
        return "ptr" if self.c_type.endswith("*") else _KINDS[self.c_type]


@dataclass(frozen=True)
class Layout:
    """A struct.

    Args:
        name: with its C++ namespace: 'attention::Args'.
        doc: one sentence.
        members: a line each, as C++ has it but for the semicolon: 'const int* rows  // [M]; null: all'.
        inner: structs that members are, by their C++ name.
        template: the type parameter of a C++ template, which only pointers name; '' for none.

    Raises OpError for a member that cannot be read, whose type has no kind of argument, or that is a struct
    with padding: its members are packed as if they were the outer one's.
    """

    name: str
    doc: str
    members: str
    inner: Sequence[Layout] = ()
    template: str = ""
    fields: tuple[Field, ...] = field(init=False)

    def __post_init__(self) -> None:
        structs = {s.name.rpartition("::")[2]: s for s in self.inner}
        fields = []
        for line in self.members.strip().splitlines():
            m = _FIELD.fullmatch(line.strip())
            known = m is not None and (m["type"] in structs or m["type"] in _KINDS or m["type"][-1] == "*")
            if m is None or not known or (m["count"] and m["type"] not in structs):
                raise OpError(
                    f"member of {self.name}", expected="a pointer, a number or a struct, and a name", got=line
                )
            inner = structs.get(m["type"])
            if inner is not None and inner.size != sum(calcsize(_LETTERS[k]) for k in inner.kinds):
                raise OpError(f"member of {self.name}", expected="a struct without padding", got=line)
            fields.append(Field(m["name"], m["type"], m["note"] or "", inner, int(m["count"] or 0)))
        object.__setattr__(self, "fields", tuple(fields))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Of its members, those of inner structs in their place."""
        kinds: list[str] = []
        for f in self.fields:
            kinds += [f.kind] if f.inner is None else f.inner.kinds * max(1, f.count)
        return tuple(kinds)

    @property
    def size(self) -> int:
        """Bytes."""
        return calcsize(packing(self.kinds))

    def offset(self, name: str) -> int:
        """Bytes before a member that is a number or a pointer, as the members before it are."""
        at = [f.name for f in self.fields].index(name)
        letters = "".join(_LETTERS[f.kind] for f in self.fields[: at + 1])
        return calcsize(f"@{letters}") - calcsize(letters[-1])

    def values(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """The members' values in order. A null pointer may be None, the rest of an array may be missing.

        Raises OpError where a member is missing or unknown, or a number does not fit 32 bits.
        """
        names = [f.name for f in self.fields]
        if set(given) != set(names):
            missing = " ".join(n for n in names if n not in given)
            unknown = " ".join(n for n in given if n not in names)
            raise OpError(
                f"members of {self.name}", expected=" ".join(names), got=f"no {missing or 'missing ones'}, "
                f"{unknown or 'no'} unknown",
            )  # fmt: skip
        return tuple(v for f in self.fields for v in self._flat(f, given[f.name]))

    def _flat(self, f: Field, value: Any) -> Iterator[Any]:
        where = f"{self.name}: {f.name}"
        if f.inner is None:
            yield _checked(where, f.kind, value)
            return
        each = value if f.count else [value]
        if len(each) > max(1, f.count):
            raise OpError(where, expected=f"at most {f.count}", got=len(each))
        for one in each:
            yield from f.inner.values(one)
        yield from [0] * (len(f.inner.kinds) * (max(1, f.count) - len(each)))


def _checked(where: str, kind: str, value: Any) -> Any:
    """A null pointer as 0. Raises OpError for a whole number that the member cannot hold."""
    if kind == "ptr":
        return 0 if value is None else value
    low, high = {"i32": (-(1 << 31), 1 << 31), "u32": (0, 1 << 32)}.get(kind, (None, None))
    if low is not None and high is not None and not low <= value < high:
        raise OpError(where, expected=f"{low} to {high - 1}", got=value)
    return value

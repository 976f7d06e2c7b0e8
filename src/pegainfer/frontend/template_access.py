"""Jinja's sandbox with fast paths for what chat templates do most: `message.role`, `text.split()`.

The sandbox makes about twenty checks for each attribute and each call, which is two thirds of the time that a
long conversation takes to render. Their results are known in advance for plain dicts, strings, loops,
namespaces and macros. For everything else the sandbox's own checks run.
"""

from __future__ import annotations

from types import BuiltinMethodType, MethodType
from typing import Any, Final

from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, missing

_OF_DICTS: Final = frozenset(dir(dict))  # the sandbox looks for an attribute before a key
# `format` would read attributes of its arguments; the sandbox has a form of it that does not.
_OF_TEXTS: Final = frozenset(n for n in dir(str) if n[0] != "_" and n not in ("format", "format_map"))
_IN_LOOPS: Final = ("_loop_vars", "_block_vars")  # arguments that compiled templates add to calls


class QuickSandbox(ImmutableSandboxedEnvironment):
    """ImmutableSandboxedEnvironment with fast paths; its results and its refusals are the same."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute not in _OF_DICTS:
                value = obj.get(attribute, missing)
                return self.undefined(obj=obj, name=attribute) if value is missing else value
        elif kind is str:
            if attribute in _OF_TEXTS:
                return getattr(obj, attribute)
        elif (kind is Namespace or kind is LoopContext) and not attribute.startswith("_"):
            try:
                value = getattr(obj, attribute)
            except AttributeError:
                return super().getattr(obj, attribute)
            if not isinstance(value, BuiltinMethodType | MethodType):  # which may be a text's `format`
                return value
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """The names of the first parameters are the sandbox's: a template's keywords must not meet them."""
        if type(__obj) is BuiltinMethodType and type(__obj.__self__) is str:
            for name in _IN_LOOPS:
                kwargs.pop(name, None)
            return __obj(*args, **kwargs)
        if type(__obj) is Macro:
            for name in _IN_LOOPS:
                kwargs.pop(name, None)
            return __obj(__context.eval_ctx, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

"""LoRA adapters as PEFT saves them: adapter_config.json says which modules have factors and how they scale.

A module W of the base becomes W x + s B A x. What changes the base's own weights, or computes something else,
is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pegainfer.contract.errors import ModelFileError, UnsupportedError

T = TypeVar("T")
HEAD = "lm_head"
MAX_RANK = 1 << 16

# Keys that are read here, and keys without a meaning for inference.
_READ = {
    "peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "rank_pattern",
    "alpha_pattern", "layers_to_transform", "layers_pattern", "init_lora_weights",
}  # fmt: skip
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "inference_mode",
    "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "task_type",
}  # fmt: skip
# Ways to start a training that leave the base's weights as they are.
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class PeftConfig:
    """A checked adapter_config.json.

    Args:
        targets, excluded: a regular expression that a module's whole name must match, or names and their
            ends at a dot.
        layers: numbers of the layers that are adapted; None: all.
        layers_patterns: what stands before a layer's number in a module's name; empty: anything.
        ranks, alphas: by pattern, for modules whose name ends with it at a dot.
    """

    rank: int
    alpha: float
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    layers_patterns: tuple[str, ...] = ()
    ranks: Mapping[str, int] | None = None
    alphas: Mapping[str, float] | None = None
    rank_stabilised: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> PeftConfig:
        """Raises UnsupportedError for what is not served, ModelFileError for what cannot be right."""
        f = _Fields(config, where)
        f.refuse_others()
        layers = config.get("layers_to_transform")
        if type(layers) is int:
            layers = [layers]
        if layers is not None:
            fits = isinstance(layers, list) and all(type(n) is int and n >= 0 for n in layers)
            f.require("layers_to_transform", fits, "layer numbers")
        read = cls(
            rank=f.rank("r", config.get("r")),
            alpha=f.number("lora_alpha", config.get("lora_alpha")),
            targets=f.names("target_modules"),
            excluded=f.names("exclude_modules", optional=True),
            layers=tuple(layers) if layers else None,
            layers_patterns=f.patterns("layers_pattern"),
            ranks={k: f.rank("rank_pattern", v) for k, v in f.by_pattern("rank_pattern").items()},
            alphas={k: f.number("alpha_pattern", v) for k, v in f.by_pattern("alpha_pattern").items()},
            rank_stabilised=f.flag("use_rslora"),
        )
        if read.layers is not None and isinstance(read.targets, str):
            f.require("layers_to_transform", False, "names in target_modules, not an expression, beside it")
        return read

    def adapts(self, module: str) -> bool:
        """Whether a module of the base, by its full name, has factors."""
        if _names(self.excluded, module):
            return False
        if self.targets == "all-linear":
            return module != HEAD and not module.endswith("embed_tokens")
        return _names(self.targets, module) and self._in_layers(module)

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.ranks or {}, module, self.rank)

    def scale_of(self, module: str) -> float:
        """s = α / r, rank-stabilised α / √r (arXiv:2312.03732), with the module's own α and r."""
        rank = self.rank_of(module)
        return _by_pattern(self.alphas or {}, module, self.alpha) / (
            math.sqrt(rank) if self.rank_stabilised else rank
        )

    def _in_layers(self, module: str) -> bool:
        if self.layers is None:
            return True
        for pattern in self.layers_patterns or (r"[^.]*",):
            found = re.match(rf".*\.{pattern}\.(\d+)\.", module)
            if found is not None:
                return int(found.group(1)) in self.layers
        return False


def _names(wanted: str | tuple[str, ...], module: str) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in wanted)


def _by_pattern(values: Mapping[str, T], module: str, default: T) -> T:
    """The value of the first pattern that the module's name ends with."""
    return next((v for k, v in values.items() if re.match(rf"(.*\.)?({k})$", module)), default)


class _Fields:
    """The config's values, checked as they are read."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self._where = config, where

    def refuse_others(self) -> None:
        """Raises UnsupportedError for another method than LoRA and for every option that changes it."""
        kind = self._config.get("peft_type")
        if kind != "LORA":
            raise self._unsupported("peft_type", "LORA")
        start = self._config.get("init_lora_weights", True)
        if not any(start is s or (isinstance(s, str) and start == s) for s in _PLAIN_STARTS):
            raise self._unsupported("init_lora_weights", "a start that leaves the base's weights as they are")
        for key in self._config:
            if key not in _READ | _WITHOUT_EFFECT and not self._is_off(key):
                raise self._unsupported(key, "none")

    def require(self, key: str, holds: bool, expected: str) -> None:
        if not holds:
            got = f"{self._config.get(key)!r:.80}"
            raise ModelFileError(
                f"adapter config: {key} is wrong", expected=expected, got=got, where=self._where
            )

    def flag(self, key: str) -> bool:
        value = self._config.get(key, False)
        self.require(key, type(value) is bool, "true or false")
        return bool(value)

    def rank(self, key: str, value: Any) -> int:
        self.require(key, type(value) is int and 0 < value <= MAX_RANK, "ranks from 1")
        return int(value)

    def number(self, key: str, value: Any) -> float:
        self.require(key, type(value) in (int, float) and math.isfinite(value), "a finite number")
        return float(value)

    def names(self, key: str, optional: bool = False) -> str | tuple[str, ...]:
        """A list of names, or an expression."""
        value = self._config.get(key)
        if value is None and optional:
            return ()
        if isinstance(value, str):
            if value != "all-linear":
                self._check_expression(key, value)
            return value
        fits = isinstance(value, list) and all(type(v) is str for v in value) and (value or optional)
        self.require(key, bool(fits), "a list of modules' names, or an expression")
        assert isinstance(value, list)
        return tuple(value)

    def patterns(self, key: str) -> tuple[str, ...]:
        value = self._config.get(key) or []
        value = [value] if isinstance(value, str) else value
        self.require(key, isinstance(value, list) and all(type(v) is str for v in value), "expressions")
        for pattern in value:
            self._check_expression(key, pattern)
        return tuple(value)

    def by_pattern(self, key: str) -> Mapping[str, Any]:
        value = self._config.get(key) or {}
        self.require(key, isinstance(value, dict), "an object")
        for pattern in value:
            self._check_expression(key, pattern)
        return dict(value)

    def _check_expression(self, key: str, pattern: str) -> None:
        try:
            re.compile(pattern)
        except re.error as e:
            raise ModelFileError(
                f"adapter config: {key} has an invalid expression", got=f"{pattern!r:.80}: {e}",
                where=self._where,
            ) from None  # fmt: skip

    def _is_off(self, key: str) -> bool:
        value = self._config[key]
        return value is None or value is False or value in ("none", [], {})

    def _unsupported(self, key: str, expected: str) -> UnsupportedError:
        return UnsupportedError(
            f"adapter config: {key} is not supported", expected=expected,
            got=f"{self._config.get(key)!r:.80}", where=self._where,
        )  # fmt: skip

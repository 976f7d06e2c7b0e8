"""docs/options.md anew, from the table of options: python -m tools.options_docs"""
# ruff: noqa: E501  (paragraphs of Markdown are lines)

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from pegainfer.app.config import EngineConfig
from pegainfer.app.options import ALIASES, LETTERS, OPPOSITES, flag_of, name_of
from pegainfer.app.unserved import SHORT, UNSERVED, Unserved
from pegainfer.cli.flags import flag_fields, help_of
from pegainfer.cli.fleet_flags import FleetFlags
from pegainfer.cli.target import ModelFlags
from pegainfer.engine.config import SchedulerConfig
from pegainfer.frontend.http.config import HttpConfig

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
HEAD = """# Options

An option has one name in four places:

| place | as it is written there | goes |
|---|---|---|
| command line | `--max-model-len 4k` | first |
| environment | `PEGAINFER_MAX_MODEL_LEN=4k` | second |
| config file, `--config FILE` or `PEGAINFER_CONFIG` | `max-model-len: 4k` | third |
| Python | `LLM(model, max_model_len="4k")` | alone: neither environment nor file are read |

The config file is YAML, as vLLM has it: one option a line, switches as `true` and `false`, several values as a list, an object where an option takes JSON. The environment is for every command: what it sets for a device that is not used is left aside. Several values of one variable are separated by spaces. `PEGAINFER_API_KEY` and `PEGAINFER_ADMIN_KEY` add to the keys that are given elsewhere.

```yaml
model: SmolLM2-135M-Instruct
served-model-name: [small, default]
max-model-len: 4k
prefix-cache: true
override-generation-config: {temperature: 0.2}
```

Sizes of memory take K, M, G and T as powers of 1,024; counts take k, m and g (powers of 1,000) and K, M and G (powers of 1,024). `--served-model-name`, `--api-key`, `--admin-key`, `--allowed-origin` and `--allowed-host` take several values after one name where MODEL was named before. Underscores are taken for dashes.

Names of vLLM, SGLang and llama-server are taken where they mean the same. This page is made from the table by `python -m tools.options_docs`.
"""
GROUPS = (
    ("The model and its device", "serve, chat, generate, run-batch", ModelFlags),
    ("How it computes", "serve, chat, generate, run-batch", EngineConfig),
    ("How requests are scheduled", "serve, chat, generate, run-batch", SchedulerConfig),
    ("The server", "serve", HttpConfig),
    ("Several models in one server", "serve", FleetFlags),
)
NOT_IN_PYTHON = frozenset({"config", "model"})  # `model` is the first argument there
IN_PYTHON = frozenset({"generation_config", "override_generation_config"})  # of the server's options


def to_markdown() -> str:
    """The page."""
    return "\n".join([HEAD, *_served(), *_unserved()])


def _served() -> Iterator[str]:
    for title, commands, config in GROUPS:
        python = config not in (HttpConfig, FleetFlags)
        yield f"## {title}\n\nOf `pegainfer {commands}`{' and of `LLM(...)`' if python else ''}.\n"
        yield "| option | other names | |\n|---|---|---|"
        for field in flag_fields(config):
            name = name_of(field.name)
            shown = f"`{flag_of(name)}`"
            if python and name in NOT_IN_PYTHON:
                shown += " (not in Python)"
            elif not python and name in IN_PYTHON:
                shown += " (also in Python)"
            yield f"| {shown} | {_others(name, field)} | {help_of(field)} |"
        yield ""


def _others(name: str, field: dataclasses.Field[object]) -> str:
    names = [*LETTERS.get(name, ()), *(flag_of(alias) for alias in ALIASES.get(name, ()))]
    if isinstance(field.default, bool):
        names += [f"--no-{name.replace('_', '-')} (off)"]
        names += [f"{flag_of(opposite)} (off)" for opposite in OPPOSITES.get(name, ())]
    names += [short for short, long in SHORT.items() if long in (name, *ALIASES.get(name, ()))]
    return ", ".join(f"`{n.removesuffix(' (off)')}`{' (off)' if n.endswith(' (off)') else ''}" for n in names)


def _unserved() -> Iterator[str]:
    yield "## Options of other engines that are not served\n"
    yield "An error names what takes their place. Values that state what holds here anyway are taken.\n"
    yield "| option | taken with | instead |\n|---|---|---|"
    for name, unserved in sorted(UNSERVED.items()):
        short = [f"`{s}`" for s, long in SHORT.items() if long == name]
        shown = ", ".join([f"`{flag_of(name)}`", *short])
        yield f"| {shown} | {_holds(unserved)} | {unserved.instead} |"
    yield ""


def _holds(unserved: Unserved) -> str:
    if not unserved.takes:
        return (
            "the flag"
            if "true" in unserved.holds
            else ("its `no-` form" if "false" in unserved.holds else "")
        )
    return ", ".join(f"`{value}`" for value in unserved.holds)


if __name__ == "__main__":
    PAGE.write_text(to_markdown())

"""Who may import whom: the one table that keeps the rooms apart, and what the package may never import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "pegainfer"

EVERYTHING = "everything"
EVERYTHING_BUT_CLI = "everything but cli"
ERRORS = "contract.errors"  # open to every room
# Room -> the rooms it may import beside itself and contract.errors.
LAW: dict[str, frozenset[str]] = {
    "contract": frozenset(),
    "frontend": frozenset({"contract"}),
    "bench": frozenset({"contract"}),  # knows servers by HTTP alone; its tokenizer is handed in
    "observe": frozenset({"contract"}),
    "kv": frozenset({"contract"}),
    "kv/device": frozenset({"contract", "runtime", "kv"}),  # its pools take a plan's copies
    "engine": frozenset({"contract", "kv"}),
    "null": frozenset({"contract"}),
    "runtime": frozenset(),
    "ops": frozenset({"runtime"}),
    "kernels": frozenset({"ops", "runtime"}),  # the generated headers follow from the ops
    "lower": frozenset({"kernels", "ops", "runtime"}),
    "measure": frozenset({"lower", "kernels", "ops", "runtime"}),
    "parallel": frozenset({"contract", "runtime"}),
    "peers": frozenset({"contract", "kv/device"}),
    "runner": frozenset({"contract", "ops", "runtime", "kv", "kv/device"}),
    "models/*": frozenset({"contract", "ops", "lower", "runtime", "kv", "kv/device", "runner", "parallel"}),
    "simulate": frozenset({"contract", "engine", "kv", "measure", "models/*"}),
    "app": frozenset({EVERYTHING_BUT_CLI}),
    "cli": frozenset({EVERYTHING}),
}

# Never imported by the package, lazily or not.
FRAMEWORKS = frozenset(
    {"torch", "transformers", "onnx", "onnxruntime", "vllm", "sglang", "tensorflow", "jax"}
)
# The web stack belongs to the HTTP front, the load client, and the commands that start them.
WEB = frozenset({"starlette", "uvicorn", "uvloop", "httptools", "fastapi"})
WEB_ROOMS = ("frontend/http/", "bench/", "cli/")

MODULE_NAME = re.compile(r"pegainfer(\.[a-z_][a-z0-9_]*)+")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module given as path parts below the package, e.g. ('models', 'llama', 'config')."""
    if parts[:2] == ("kv", "device"):
        return "kv/device"
    if parts[0] == "models" and len(parts) > 1:
        return f"models/{parts[1]}"
    return parts[0]


def name_of(path: Path) -> str:
    """The dotted name of a module's file."""
    parts = ("pegainfer", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def names_module(text: str) -> bool:
    return MODULE_NAME.fullmatch(text) is not None and is_module(text)


def imports_of(path: Path, *, tables: bool = True) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import in the file, wherever it stands.

    With `tables` a string that names one of our modules counts too: tables of lazily loaded modules obey the
    same law.
    """
    package = ("pegainfer", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*up, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield node.lineno, whole if is_module(whole) else base
        elif tables and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from [(node.lineno, node.value)] if names_module(node.value) else []


def allowed(room: str, other: str) -> bool:
    law = LAW["models/*" if room.startswith("models/") else room]
    kind = "models/*" if other.startswith("models/") else other
    if room == other or kind in law:
        return True
    return EVERYTHING in law or (EVERYTHING_BUT_CLI in law and other != "cli")


def violations(path: Path) -> Iterator[str]:
    relative = path.relative_to(PACKAGE)
    parts = relative.with_suffix("").parts
    for line, name in imports_of(path):
        top = name.split(".")[0]
        if top in FRAMEWORKS:
            yield f"{relative}:{line} imports {name}: a model framework"
        if top in WEB and not str(relative).startswith(WEB_ROOMS):
            yield f"{relative}:{line} imports {name}: the web stack belongs to {' and '.join(WEB_ROOMS)}"
        if top != "pegainfer" or len(parts) == 1:  # pegainfer/__init__.py only names its lazy exports
            continue
        target = tuple(name.split(".")[1:])
        if not target or ".".join(target) == ERRORS:
            continue
        room, other = room_of(parts), room_of(target)
        if not allowed(room, other):
            yield f"{relative}:{line} imports {name}: {room} may not import {other}"


def test_every_module_obeys_the_import_law() -> None:
    broken = [v for path in modules() for v in violations(path)]
    assert not broken, "\n".join(broken)


def test_no_import_runs_back() -> None:
    """Nor one for types only, nor one within a function: two modules that need each other are one thing."""
    needs = {
        name_of(path): {name for _, name in imports_of(path, tables=False) if is_module(name)}
        for path in modules()
        if path != PACKAGE / "__init__.py"
    }
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail(" imported by ".join(error.args[1]))


def test_every_room_is_in_the_law() -> None:
    rooms = {room_of(p.relative_to(PACKAGE).parts) for p in modules() if p.parent != PACKAGE}
    unknown = {r for r in rooms if r not in LAW and not r.startswith("models")}
    assert not unknown, f"rooms without a line in the law: {sorted(unknown)}"


@pytest.mark.parametrize(
    ("room", "other", "may"),
    [
        ("contract", "engine", False),
        ("engine", "runtime", False),
        ("frontend", "engine", False),
        ("runtime", "contract", False),
        ("lower", "models/llama", False),
        ("models/llama", "models/qwen3", False),
        ("models/llama", "lower", True),
        ("models/llama", "measure", False),
        ("models/llama", "engine", False),
        ("models/llama", "runner", True),
        ("runner", "models/llama", False),
        ("runner", "lower", False),
        ("kernels", "lower", False),
        ("lower", "measure", False),
        ("measure", "lower", True),
        ("parallel", "contract", True),
        ("peers", "kv/device", True),
        ("peers", "engine", False),
        ("engine", "peers", False),
        ("parallel", "engine", False),
        ("engine", "parallel", False),
        ("app", "models/llama", True),
        ("app", "cli", False),
        ("bench", "frontend", False),
        ("cli", "app", True),
    ],
)
def test_the_law_says(room: str, other: str, may: bool) -> None:
    assert allowed(room, other) is may


def test_the_checker_sees_each_way_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "pegainfer"
    for name in ("contract/step.py", "contract/errors.py", "engine/loop.py", "cli/main.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
        (root / name).with_name("__init__.py").write_text("")
    (root / "contract" / "bad.py").write_text(
        "import pegainfer.engine.loop\n"
        "from pegainfer.engine import loop\n"
        "from ..engine import loop\n"
        "def f():\n"
        "    from pegainfer import cli\n"
        "TABLE = {'x': 'pegainfer.cli.main'}\n"
        "from pegainfer.contract.errors import PegaError\n"
        "import torch\n"
        "import uvicorn\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", root)
    lines = [int(v.split(":")[1].split()[0]) for v in violations(root / "contract" / "bad.py")]
    assert sorted(lines) == [1, 2, 3, 5, 6, 8, 9]


def test_import_pegainfer_loads_nothing_heavy() -> None:
    probe = "import pegainfer, sys; print('\\n'.join(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True)
    heavy = {
        *FRAMEWORKS,
        *WEB,
        *("triton", "ray", "numpy", "msgspec", "tokenizers", "jinja2", "typer", "rich", "asyncio", "ctypes"),
    }
    loaded = set(done.stdout.split())
    assert not loaded & heavy
    assert "pegainfer" in loaded


def test_reading_weights_imports_nothing_for_annotations_alone() -> None:
    """numpy.typing takes part of the time in which an engine starts."""
    code = "import sys, pegainfer.app.assemble, pegainfer.app.load; print('numpy.typing' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

"""pegainfer list, show, rm and ps: the models on this machine and the servers that run them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegainfer.app.cache import DEFAULT_MODEL
from pegainfer.cli.target import MODEL_HELP

if TYPE_CHECKING:
    from pegainfer.app.library import Cached


def _cached_names(incomplete: str) -> list[str]:
    """For the shell's completion."""
    from pegainfer.app.library import cached_models

    return [m.name for m in cached_models() if m.name.startswith(incomplete)]


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DownloadDir = Annotated[
    str | None, typer.Option(help="Folder of models of the hub; default: that library's own cache.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a model of the hub.")]


def list_models(download_dir: DownloadDir = None, as_json: AsJson = False) -> None:
    """List the models on this machine: size, format, and whether each can be served here, or why not."""
    from pegainfer.app.library import cached_models, verdict

    rows = [
        {
            "name": model.name,
            "revision": model.revision,
            "bytes": model.nbytes,
            "format": _format(model),
            "servable": not (why := verdict(model)),
            "reason": why,
        }
        for model in cached_models(download_dir)
    ]
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    if not rows:
        print("no models are here; `pegainfer pull` fetches the default one")
        return
    _table(
        ("NAME", "SIZE", "FORMAT", "SERVABLE"),
        [
            (
                f"{r['name']} ({r['revision']})" if r["revision"] else str(r["name"]),
                _size(r["bytes"]),
                str(r["format"]),
                "yes" if r["servable"] else f"no: {r['reason']}",
            )
            for r in rows
        ],
    )


def _format(model: Cached) -> str:
    from pegainfer.app.quants import quant_of

    if model.ref.kind == "folder":
        return "safetensors"
    return f"GGUF {quant_of(model.ref.path.name) or ''}".strip()


def show(
    model: Annotated[
        str, typer.Argument(help=MODEL_HELP, autocompletion=_cached_names)
    ] = DEFAULT_MODEL.display_name,
    revision: Revision = None,
    download_dir: DownloadDir = None,
    as_json: AsJson = False,
) -> None:
    """Show a model on this machine: architecture, sizes, formats, template, and the memory it needs."""
    from pegainfer.app.library import examine
    from pegainfer.app.resolve import resolve
    from pegainfer.app.text import load_text
    from pegainfer.runtime.control_groups import available_memory

    ref = resolve(model, revision=revision, offline=True, download_dir=download_dir)
    facts, text = examine(ref.path), load_text(ref)
    shown: dict[str, Any] = {
        "name": ref.name,
        "path": str(ref.path),
        "architecture": facts.architecture,
        "parameters": facts.parameters,
        "formats": facts.formats,
        "context": facts.context,
        "chat_template": text.template is not None,
        "tool_calls": _tool_style(text.template),
        "eos_token_ids": list(text.tokenizer.eos_token_ids),
        "sampling": {k: v for k, v in text.generation.items() if not isinstance(v, memoryview)},
        "weight_bytes": facts.weight_bytes,
        "kv_bytes_per_token": facts.kv_bytes,
        "state_bytes": facts.state_bytes,
        "served_context": facts.served_context,
        "memory_bytes": facts.memory,
        "free_bytes": available_memory(),
    }
    if as_json:
        print(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    _table(None, list(_lines(shown)))


def _lines(shown: dict[str, Any]) -> Iterable[tuple[str, str]]:
    yield "name", shown["name"]
    yield "path", shown["path"]
    yield "architecture", shown["architecture"]
    yield "parameters", f"{shown['parameters'] / 1e6:,.1f} million"
    yield "weights", ", ".join(f"{name} {_size(n)}" for name, n in shown["formats"].items())
    yield "context", f"{shown['context']} tokens"
    yield "chat template", "yes" if shown["chat_template"] else "no: completions alone"
    yield "tool calls", shown["tool_calls"] or "-"
    sampling = ", ".join(f"{k} {v}" for k, v in shown["sampling"].items())
    yield "its own sampling", sampling or "-"
    yield "a token's KV", f"{shown['kv_bytes_per_token'] / 1024:.1f} KiB"
    if shown["state_bytes"]:
        yield "a sequence's state", _size(shown["state_bytes"])
    memory, free = _size(shown["memory_bytes"]), _size(shown["free_bytes"])
    yield "memory here", f"{memory} with KV for {shown['served_context']} tokens a sequence; {free} are free"


def _tool_style(template: Any) -> str:
    from pegainfer.frontend.tools.prompt import knows_tools
    from pegainfer.frontend.tools.styles import AUTO, choose_style

    if template is None:
        return ""
    style = choose_style(AUTO, template.all_source).name
    return style if knows_tools(template.all_source) else f"{style}, told of in the system turn"


def rm(
    models: Annotated[
        list[str],
        typer.Argument(help="Models as `pegainfer list` names them.", autocompletion=_cached_names),
    ],
    revision: Revision = None,
    download_dir: DownloadDir = None,
) -> None:
    """Delete models from the cache. A repository without :QUANT means all that is cached of it."""
    from pegainfer.app.library import delete, find_cached

    # All are looked up first: a wrong name deletes nothing.
    found = [find_cached(name, revision=revision, download_dir=download_dir) for name in models]
    unique = {(m.name, m.revision): m for each in found for m in each}
    freed = delete(list(unique.values()), download_dir)
    print(f"deleted {', '.join(m.name for m in unique.values())}: {_size(freed)} free")


def ps(as_json: AsJson = False) -> None:
    """List the servers of this user that run here, with their models and memory."""
    from pegainfer.cli.running import running_servers
    from pegainfer.frontend.processes import memory_of, process_family

    rows = [
        {
            "pid": server.pid,
            "url": server.url,
            "models": list(server.models),
            "device": server.device,
            "max_model_len": server.max_model_len,
            "memory_bytes": memory_of(process_family(server.pid)),
            "seconds": round(time.time() - server.since, 1),
        }
        for server in running_servers()
    ]
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    if not rows:
        print("no server runs here")
        return
    _table(
        ("PID", "MODELS", "URL", "MEMORY", "UP", "DEVICE"),
        [
            (
                str(r["pid"]),
                " ".join(map(str, r["models"])),  # type: ignore[call-overload]
                str(r["url"]),
                _size(r["memory_bytes"]),
                _duration(r["seconds"]),
                str(r["device"]),
            )
            for r in rows
        ],
    )


def _size(nbytes: Any) -> str:
    """'93.8 MiB'."""
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes < 1 << 30 else f"{nbytes / 2**30:,.2f} GiB"


def _duration(seconds: Any) -> str:
    """'2 h 5 min'."""
    minutes = int(seconds) // 60
    if minutes < 1:
        return f"{int(seconds)} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _table(head: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they must be; the last one is not padded."""
    lines = [*([head] if head is not None else []), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    for line in lines:
        print("  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1]]))

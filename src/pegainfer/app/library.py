"""The models on this machine: what is cached, what each one is, what it needs, and how it is deleted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pegainfer.app.bounds import model_groups, runner_info
from pegainfer.app.cache import DEFAULT_MODEL, cached_model
from pegainfer.app.config import EngineConfig
from pegainfer.app.hub import HubName
from pegainfer.app.load import open_model
from pegainfer.app.memory import state_bytes
from pegainfer.app.quants import quant_of
from pegainfer.app.resolve import ModelRef
from pegainfer.contract.errors import ConfigError, PegaError
from pegainfer.engine.config import SchedulerConfig
from pegainfer.kv.device.layout import PageLayout, block_bytes
from pegainfer.runtime.user_cache import cache_folder
from pegainfer.runtime.weights.gguf_split import group_parts


@dataclass(frozen=True)
class Cached:
    """One model in a cache.

    Args:
        name: by which commands find it.
        repository: of the hub; '' for the default model.
        revision: '' for the main branch of a repository, and for the default model.
        files: what of the cache belongs to it alone.
        nbytes: on the disk.
    """

    name: str
    repository: str
    revision: str
    ref: ModelRef
    files: tuple[Path, ...]
    nbytes: int


@dataclass(frozen=True)
class Facts:
    """What a model is, read from its files.

    Args:
        formats: bytes of the weights by storage format.
        parameters: elements of all weights.
        context: tokens that it was trained for.
        kv_bytes: of the keys and values of one token, as the CPU stores them by default.
        state_bytes: of the recurrent states of one sequence; 0 for a model without them.
        served_context: tokens of a sequence on this machine by default.
        cache_bytes: of the KV cache on this machine by default.
    """

    architecture: str
    formats: dict[str, int]
    parameters: int
    context: int
    kv_bytes: int
    state_bytes: int
    served_context: int
    cache_bytes: int

    @property
    def weight_bytes(self) -> int:
        return sum(self.formats.values())

    @property
    def memory(self) -> int:
        """Bytes of weights and KV cache."""
        return self.weight_bytes + self.cache_bytes


def examine(
    path: Path, config: EngineConfig | None = None, scheduler: SchedulerConfig | None = None
) -> Facts:
    """Reads a model's headers, and none of its weights.

    Args:
        config, scheduler: what it would be served with; None: the defaults.

    Raises ConfigError, ModelFileError or UnsupportedError with the reason why it cannot be served here.
    """
    config = config or EngineConfig()
    with open_model(path) as (model, architecture):
        formats: Counter[str] = Counter()
        for weight in model.weights.values():
            formats[weight.scheme.name] += sum(part.nbytes for part in weight.parts.values())
        groups = model_groups(model, config)
        info = runner_info(model, config, scheduler or SchedulerConfig())
        return Facts(
            architecture=architecture,
            formats=dict(formats.most_common()),
            parameters=sum(math.prod(weight.shape) for weight in model.weights.values()),
            context=model.max_position_embeddings,
            kv_bytes=sum(block_bytes(g) // g.block_size for g in groups if isinstance(g, PageLayout)),
            state_bytes=state_bytes(groups),
            served_context=info.max_model_len,
            cache_bytes=sum(n * block_bytes(g) for n, g in zip(info.num_blocks, groups, strict=True)),
        )


def cached_models(download_dir: str | None = None) -> list[Cached]:
    """Every model in the caches, by name: the default model's and the hub library's.

    Args:
        download_dir: takes the place of the hub library's cache.
    """
    found = list(_hub_models(download_dir))
    path = cached_model()
    if path is not None:
        name = DEFAULT_MODEL.display_name
        found.append(Cached(name, "", "", ModelRef("gguf", path, name), (path,), path.stat().st_size))
    return sorted(found, key=lambda model: (model.name.lower(), model.revision))


def _hub_models(download_dir: str | None) -> Iterator[Cached]:
    for repo, revision, label in _revisions(download_dir):
        paths = {str(f.file_path.relative_to(revision.snapshot_path)): f for f in revision.files}
        ggufs = group_parts(path for path in paths if path.endswith(".gguf"))
        quants = Counter(quant_of(parts[0]) for parts in ggufs)
        for parts in ggufs:
            alone = quants[quant_of(parts[0])] == 1  # else only its path says which one is meant
            yield _gguf(repo.repo_id, label, parts[0], [paths[part] for part in parts], alone)
        if any(path.endswith(".safetensors") and "/" not in path for path in paths):
            others = [f for path, f in paths.items() if not path.endswith(".gguf")]
            ref = ModelRef("folder", revision.snapshot_path, repo.repo_id)
            files = tuple(f.file_path for f in others)
            yield Cached(repo.repo_id, repo.repo_id, label, ref, files, sum(f.size_on_disk for f in others))


def _gguf(repository: str, label: str, path: str, parts: list[Any], alone: bool) -> Cached:
    """A model in one file, or in parts, of which `path` is the first."""
    quant = quant_of(path)
    name = f"{repository}:{quant}" if quant is not None and alone else f"{repository}/{path}"
    files = tuple(part.file_path for part in parts)
    ref = ModelRef("gguf", files[0], name)
    return Cached(name, repository, label, ref, files, sum(part.size_on_disk for part in parts))


def _revisions(download_dir: str | None) -> Iterator[tuple[Any, Any, str]]:
    """(repository, revision, its label) of the hub library's cache; the label of the main branch is ''."""
    info = _scan(download_dir)
    for repo in () if info is None else info.repos:
        if repo.repo_type != "model":
            continue
        for revision in repo.revisions:
            refs = sorted(revision.refs)
            label = "" if "main" in refs else refs[0] if refs else revision.commit_hash[:12]
            yield repo, revision, label


def _scan(download_dir: str | None) -> Any:
    """The hub library's account of its cache; None where there is no cache."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(download_dir or constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None


def verdict(model: Cached) -> str:
    """'' for a model that can be served here, else why not."""
    try:
        examine(model.ref.path)
    except PegaError as e:
        return str(e)
    return ""


def find_cached(
    reference: str, *, revision: str | None = None, download_dir: str | None = None
) -> list[Cached]:
    """The cached models that a name means; a repository without a quantisation means all of it.

    Raises ConfigError where there is none.
    """
    named = HubName.parse(reference)
    whole = named is not None and named.quant is None and named.file is None

    def meant(model: Cached) -> bool:
        name, wanted = model.name.lower(), reference.lower()
        if name == wanted or (whole and model.repository.lower() == wanted):
            return True
        if named is None or named.file is None or model.repository != named.repository:
            return False
        return any(path.as_posix().endswith(f"/{named.file}") for path in model.files)

    found = [
        model
        for model in cached_models(download_dir)
        if meant(model) and (revision is None or model.revision == revision)
    ]
    if not found:
        known = " ".join(model.name for model in cached_models(download_dir))
        raise ConfigError(
            "no such model in the cache", expected=known[:400] or "none is cached", got=f"{reference!r:.200}",
            remedy="see pegainfer list; a file of your own is deleted as any other file",
        )  # fmt: skip
    return found


def delete(models: list[Cached], download_dir: str | None = None) -> int:
    """Deletes them from the cache and returns the bytes that became free. Raises ConfigError."""
    freed = 0
    try:
        for model in models:
            for path in model.files:
                freed += _delete_file(path)
        _delete_empty(download_dir)
    except OSError as e:
        raise ConfigError(f"cannot delete: {e.strerror}", where=e.filename) from None
    return freed


def _delete_file(path: Path) -> int:
    """Deletes a file of a cache: the link in a snapshot, and what it points to unless another link does."""
    target = path.resolve()
    size = target.stat().st_size if target.exists() else 0
    note = path.with_name(path.name + ".verified")
    linked = path.is_symlink()
    path.unlink(missing_ok=True)
    if path.parent == cache_folder():
        note.unlink(missing_ok=True)
    if linked:
        snapshots = next((p for p in path.parents if p.name == "snapshots"), None)
        if snapshots is not None and any(p.resolve() == target for p in snapshots.rglob("*")):
            return 0
        target.unlink(missing_ok=True)
    return size


def _delete_empty(download_dir: str | None) -> None:
    """Deletes repositories of which no weights are left, with their small files."""
    info = _scan(download_dir)
    if info is None:
        return
    weights = (".gguf", ".safetensors")
    empty = [
        revision.commit_hash
        for repo in info.repos
        if repo.repo_type == "model"
        for revision in repo.revisions
        if not any(file.file_name.endswith(weights) for file in revision.files)
    ]
    info.delete_revisions(*empty).execute()

"""Models of the Hugging Face hub, by name: fetched into that library's own cache, which other tools share.

A name is `owner/model`, with `:QUANT` or `/file.gguf` behind it where a repository holds GGUF files. Only
configuration, tokenizer and weights are fetched, and nothing in them is ever run.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pegainfer.app.quants import Choice, choose_file
from pegainfer.contract.errors import ConfigError
from pegainfer.frontend.vocabulary_files import VOCABULARIES

log = logging.getLogger(__name__)

_NAME = re.compile(
    r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::([\w.-]{1,40})|/([\w./-]{1,200}\.gguf))?"
)
SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tiktoken.model",
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "*.safetensors.index.json", "modules.json", "1_Pooling/config.json",
)  # fmt: skip
# Weights in another layout that some repositories hold beside those that are read here.
OTHERS = ("*/*.safetensors*", "consolidated*")
SLOW_SECONDS = 3.0  # the library asks again for some 20 seconds, in silence, where there is no network
NETWORK = "check the network; HTTPS_PROXY and HF_ENDPOINT are obeyed"


class HubName(msgspec.Struct, frozen=True):
    """What a reference names: a repository, and one of its GGUF files by quantisation or by path."""

    repository: str
    quant: str | None = None
    file: str | None = None

    @staticmethod
    def parse(reference: str) -> HubName | None:
        """None for what is no such name."""
        match = _NAME.fullmatch(reference)
        if match is None or ".." in reference or "--" in match[1]:
            return None
        return HubName(match[1], match[2], match[3])


class FetchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is fetched.

    revision: branch, tag or commit; None: the main branch.
    offline: take only what was fetched before.
    weights: without, configuration and tokenizer alone.
    folder: of all fetched models; None: the library's own.
    tell: takes one line for the user about what is fetched and why.
    """

    revision: str | None = None
    offline: bool = False
    weights: bool = True
    folder: str | None = None
    tell: Callable[[str], None] | None = None


class Listing(msgspec.Struct, frozen=True):
    """A repository's files with their bytes; the architecture of its GGUF files where the hub knows it."""

    files: Mapping[str, int]
    architecture: str | None


def fetch(name: HubName, options: FetchOptions) -> Path:
    """The model's folder or GGUF file on this machine; what is missing is fetched, broken downloads go on.

    Whether it can be served is decided from its configuration and its list of files first.

    Raises ConfigError: no such model or revision, no permission, no network, no space. UnsupportedError: the
    model cannot be served.
    """
    # Read when the library is imported.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # what fails is told in one line, its retries are not
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import constants, errors

    options = msgspec.structs.replace(options, offline=options.offline or constants.HF_HUB_OFFLINE)
    with _told(name, options.revision, options.offline):
        try:
            return _fetch(name, options)
        except Exception as e:
            if options.offline or not _unreachable(e):
                raise
            try:
                found = _fetch(name, msgspec.structs.replace(options, offline=True))
            except errors.LocalEntryNotFoundError:
                raise e from None
            log.warning("the hub cannot be reached: %s as it was fetched before", name.repository)
            return found


def _fetch(name: HubName, options: FetchOptions) -> Path:
    from huggingface_hub import snapshot_download

    listing = _list(name, options)
    choice = _choose(name, listing)
    chosen = None if choice is None else choice.files[0]
    if not options.offline and options.weights:
        _check(name, listing, chosen, options)
    if choice is not None:
        wanted = list(choice.files)
        _tell(name, choice, listing, options)
    else:
        wanted = [*SMALL_FILES, *(["*.safetensors"] if options.weights else [])]
    found = snapshot_download(
        name.repository, revision=options.revision, local_files_only=options.offline, endpoint=_endpoint(),
        allow_patterns=wanted,
        ignore_patterns=None if chosen else list(OTHERS),
        cache_dir=options.folder,
    )  # fmt: skip
    return Path(found) / chosen if chosen else Path(found)


def _tell(name: HubName, choice: Choice, listing: Listing, options: FetchOptions) -> None:
    """Says what is about to be fetched and why; nothing where all of it is on this machine."""
    from huggingface_hub import try_to_load_from_cache

    here = [
        try_to_load_from_cache(name.repository, file, cache_dir=options.folder, revision=options.revision)
        for file in choice.files
    ]
    if options.tell is None or all(isinstance(path, str) for path in here):
        return
    size = sum(listing.files[file] for file in choice.files) / 2**30
    parts = f"{len(choice.files)} parts, " if len(choice.files) > 1 else ""
    options.tell(f"{name.repository}: fetching {choice.files[0]} ({parts}{size:.1f} GiB): {choice.why}")


def _choose(name: HubName, listing: Listing) -> Choice | None:
    """Which GGUF model is meant; None where the repository holds safetensors and no GGUF file is named.

    Raises ConfigError, UnsupportedError.
    """
    ggufs = {path: size for path, size in listing.files.items() if path.endswith(".gguf")}
    plain = any(path.endswith(".safetensors") and "/" not in path for path in listing.files)
    if name.file is None and name.quant is None and (plain or not ggufs):
        return None
    from pegainfer.ops.tensor import WEIGHTS
    from pegainfer.runtime.control_groups import available_memory
    from pegainfer.runtime.weights.formats import GGML_TYPES

    served = tuple(form for form in WEIGHTS if form in GGML_TYPES.values())
    return choose_file(name.repository, ggufs, served, available_memory(), quant=name.quant, file=name.file)


def _check(name: HubName, listing: Listing, chosen: str | None, options: FetchOptions) -> None:
    """Refuses a model that cannot be served, before its weights are fetched.

    Raises UnsupportedError and ConfigError with the reason.
    """
    from pegainfer.app.load import read_config
    from pegainfer.app.registry import find_line

    if chosen is not None:
        if listing.architecture is not None:
            find_line(listing.architecture, f"{name.repository}/{chosen}")
        return
    needed = ("config.json", "tokenizer.json", ".safetensors")
    top = ["tokenizer.json" if path in VOCABULARIES else path for path in listing.files if "/" not in path]
    missing = [part for part in needed if not any(path.endswith(part) for path in top)]
    if missing:
        raise ConfigError(
            "the repository holds no whole model",
            expected="config.json, tokenizer.json, *.safetensors, or GGUF files",
            got="no " + ", no ".join(missing),
            where=name.repository,
        )
    from huggingface_hub import hf_hub_download

    config = hf_hub_download(
        name.repository, "config.json", revision=options.revision, endpoint=_endpoint(),
        cache_dir=options.folder,
    )  # fmt: skip
    line, _, values, where = read_config(Path(config).parent)
    line.from_config(values, where)


def _unreachable(e: Exception) -> bool:
    """The library's HTTP client has changed between its versions, and its errors with it."""
    return isinstance(e, ConnectionError | TimeoutError) or (
        type(e).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "requests")
        and not hasattr(e, "response")
    )


def _endpoint() -> str | None:
    """Asked for at every call: the library reads it only when it is imported."""
    return os.environ.get("HF_ENDPOINT")


def _list(name: HubName, options: FetchOptions) -> Listing:
    """What the repository holds; offline, what of it is here."""
    from huggingface_hub import HfApi, snapshot_download

    if not options.offline:
        with _slow_answer_told(name):
            info = HfApi(endpoint=_endpoint()).model_info(
                name.repository, revision=options.revision, files_metadata=True
            )
        files = {f.rfilename: f.size or 0 for f in info.siblings or ()}
        gguf = getattr(info, "gguf", None) or {}
        return Listing(files, gguf.get("architecture"))
    # Newer versions of the library want a whole snapshot unless told which files matter.
    folder = Path(
        snapshot_download(
            name.repository, revision=options.revision, local_files_only=True, allow_patterns="config.json",
            cache_dir=options.folder,
        )
    )  # fmt: skip
    here = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    return Listing(here, None)


@contextmanager
def _slow_answer_told(name: HubName) -> Iterator[None]:
    """Says so once where the hub takes long to answer."""
    text = "the hub has not answered yet for %s; serve --offline takes what was fetched before"
    timer = threading.Timer(SLOW_SECONDS, log.warning, (text, name.repository))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _told(name: HubName, revision: str | None, offline: bool) -> Iterator[None]:
    """Turns what the library raises into one line with a remedy."""
    from huggingface_hub import errors

    where = name.repository + (f" at {revision}" if revision else "")
    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(
            "the model is gated", where=where,
            remedy="accept its terms on its page, and set HF_TOKEN to a token of that account",
        ) from None  # fmt: skip
    except errors.RevisionNotFoundError:
        raise ConfigError("no such revision", where=where, remedy="leave --revision out") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            "the hub has no such model, or it is private", where=where,
            remedy="check the name (there is no such folder here either); a private one needs HF_TOKEN",
        ) from None  # fmt: skip
    except errors.LocalEntryNotFoundError as e:
        if offline:
            raise ConfigError(
                "the model was not fetched before", where=where, remedy="leave --offline out"
            ) from None
        raise ConfigError(
            "the hub cannot be reached", where=where, got=f"{e!s:.120}", remedy=NETWORK
        ) from None
    except errors.HfHubHTTPError as e:
        raise ConfigError("the hub refuses", got=f"{e!s:.200}", where=where) from None
    except (OSError, ValueError, RuntimeError) as e:
        full = isinstance(e, OSError) and e.errno == 28
        raise ConfigError(
            "no space for the model" if full else "the model's download failed",
            got=f"{type(e).__name__}: {e!s:.200}", where=where,
            remedy="free some, or set HF_HOME to a folder on another disk" if full else NETWORK,
        ) from None  # fmt: skip
    except Exception as e:
        if not _unreachable(e):
            raise
        raise ConfigError(
            "the hub cannot be reached", got=f"{type(e).__name__}: {e!s:.200}", where=where, remedy=NETWORK
        ) from None

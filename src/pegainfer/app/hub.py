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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pegainfer.contract.errors import ConfigError

log = logging.getLogger(__name__)

_NAME = re.compile(
    r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::([\w.-]{1,40})|/([\w./-]{1,200}\.gguf))?"
)
SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "*.safetensors.index.json",
)  # fmt: skip
# Weights in another layout that some repositories hold beside those that are read here.
OTHERS = ("*/*", "consolidated*")
DEFAULT_QUANT = "Q4_K_M"
SLOW_SECONDS = 3.0  # the library asks again for some 20 seconds, in silence, where there is no network
NETWORK = "check the network; HTTPS_PROXY and HF_ENDPOINT are obeyed"


@dataclass(frozen=True)
class HubName:
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


def fetch(
    name: HubName,
    *,
    revision: str | None = None,
    offline: bool = False,
    weights: bool = True,
    folder: str | None = None,
) -> Path:
    """The model's folder or GGUF file on this machine; what is missing is fetched, broken downloads go on.

    Args:
        revision: branch, tag or commit; None: the main branch.
        offline: take only what was fetched before.
        weights: without, configuration and tokenizer alone.
        folder: of all fetched models; None: the library's own.

    Raises ConfigError: no such model or revision, no permission, no network, no space.
    """
    # Read when the library is imported.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # what fails is told in one line, its retries are not
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import constants, errors

    offline = offline or constants.HF_HUB_OFFLINE
    with _told(name, revision, offline):
        try:
            return _fetch(name, revision, offline, weights, folder)
        except Exception as e:
            if offline or not _unreachable(e):
                raise
            try:
                found = _fetch(name, revision, True, weights, folder)
            except errors.LocalEntryNotFoundError:
                raise e from None
            log.warning("the hub cannot be reached: %s as it was fetched before", name.repository)
            return found


def _fetch(name: HubName, revision: str | None, offline: bool, weights: bool, folder: str | None) -> Path:
    from huggingface_hub import snapshot_download

    chosen = _gguf(name, _files(name, revision, offline, folder))
    wanted = [chosen] if chosen else [*SMALL_FILES, *(["*.safetensors"] if weights else [])]
    found = snapshot_download(
        name.repository, revision=revision, local_files_only=offline, endpoint=_endpoint(),
        allow_patterns=wanted,
        ignore_patterns=None if chosen else list(OTHERS),
        cache_dir=folder,
    )  # fmt: skip
    return Path(found) / chosen if chosen else Path(found)


def _unreachable(e: Exception) -> bool:
    """The library's HTTP client has changed between its versions, and its errors with it."""
    return isinstance(e, ConnectionError | TimeoutError) or (
        type(e).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "requests")
        and not hasattr(e, "response")
    )


def _endpoint() -> str | None:
    """Asked for at every call: the library reads it only when it is imported."""
    return os.environ.get("HF_ENDPOINT")


def _files(name: HubName, revision: str | None, offline: bool, cache: str | None) -> list[str]:
    """Paths in the repository; offline, those that are here."""
    from huggingface_hub import HfApi, snapshot_download

    if not offline:
        with _slow_answer_told(name):
            return HfApi(endpoint=_endpoint()).list_repo_files(name.repository, revision=revision)
    # Newer versions of the library want a whole snapshot unless told which files matter.
    folder = Path(
        snapshot_download(
            name.repository,
            revision=revision,
            local_files_only=True,
            allow_patterns="config.json",
            cache_dir=cache,
        )
    )
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


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


def _gguf(name: HubName, files: Sequence[str]) -> str | None:
    """Which GGUF file is meant; None where safetensors are. Raises ConfigError where it is not clear."""
    ggufs = sorted(f for f in files if f.endswith(".gguf"))
    plain = any(f.endswith(".safetensors") and "/" not in f for f in files)
    if name.file is None and name.quant is None and (plain or not ggufs):
        return None
    if name.file is not None:
        found = [f for f in ggufs if f == name.file]
    else:
        wanted = (name.quant or (DEFAULT_QUANT if len(ggufs) > 1 else "")).lower()
        # It stands between the model's name and the suffix: Model-Q4_K_M.gguf, model.q8_0.gguf.
        between = re.compile(rf"(^|[-._/]){re.escape(wanted)}[-.]")
        found = [f for f in ggufs if not wanted or between.search(f.lower())]
    if len(found) != 1:
        raise ConfigError(
            f"{name.repository} has {'no' if not found else 'more than one'} such GGUF file",
            expected=" ".join(ggufs)[:400] or "a repository with GGUF files",
            got=name.file or name.quant or f"{len(ggufs)} files, none chosen",
            remedy=f"name one: {name.repository}:QUANT or {name.repository}/FILE.gguf",
        )
    return found[0]


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

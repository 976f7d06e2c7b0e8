"""Whether a file's tensors are those that a line's table of weights names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

import numpy as np

from pegainfer.contract.errors import ModelFileError, UnsupportedError
from pegainfer.runtime.weights.tensorfile import TensorFile


def check_tied(file: TensorFile, embed: str, head: str) -> None:
    """Some writers store a tied head as well; then it must be the embedding."""
    if embed in file.tensors and not np.array_equal(file.part(head).bytes(), file.part(embed).bytes()):
        raise ModelFileError(
            "the config ties lm_head to the embedding, but their tensors differ",
            expected=f"{head} equal to {embed}",
            where=file.path,
            remedy="set tie_word_embeddings to false in config.json if the head is its own",
        )


def check_names(
    line: str, file: TensorFile, wanted: Collection[str], ignored: Sequence[str], head: str
) -> None:
    """Raises ModelFileError for missing tensors, UnsupportedError for unknown ones.

    Args:
        head: the name of the output matrix, for the remedy where it alone is missing.
    """
    if missing := [n for n in wanted if n not in file.tensors]:
        tied = "set tie_word_embeddings in config.json to true if the head is the embedding"
        raise ModelFileError(
            "tensors are missing",
            expected=missing[0] + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
            got=f"{len(file.tensors)} tensors",
            where=file.path,
            remedy=tied if missing == [head] else "use a complete file, or correct the number of layers",
        )
    extra = [n for n in file.tensors if n not in wanted and not any(fnmatchcase(n, p) for p in ignored)]
    if extra:
        raise UnsupportedError(
            f"tensors that the {line} line does not use",
            expected=f"{len(wanted)} tensors by name",
            got=extra[0] + (f" and {len(extra) - 1} more" if len(extra) > 1 else ""),
            where=file.path,
            remedy="the model has features that this line lacks, or its config names too few layers",
        )

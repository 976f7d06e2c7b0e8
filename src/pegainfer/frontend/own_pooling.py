"""What a model's files say of embeddings and scores."""

from __future__ import annotations

from typing import Literal

import msgspec

from pegainfer.contract.errors import UnsupportedError

Pooling = Literal["mean", "last"]
ScoreMethod = Literal["yes-no", "cosine"]


class OwnPooling(msgspec.Struct, frozen=True, kw_only=True):
    """How one vector is made of a text's hidden states, as the model was trained for it.

    Args:
        pooling: None where the files say nothing, or name what is not served (`unserved`).
        normalize: whether vectors are scaled to length 1.
        unserved: a pooling or a layer behind it that this engine does not have; '' for none.
        reranker: the model was trained to answer yes or no to a query and a document.
    """

    pooling: Pooling | None = None
    normalize: bool = True
    unserved: str = ""
    reranker: bool = False

    def choose(self, asked: Literal["auto", "mean", "last"] | None) -> Pooling:
        """The pooling of a request. Raises UnsupportedError where the model's own one is not served.

        Args:
            asked: what the user wants; auto and None: the model's own one, else the mean.
        """
        if asked is not None and asked != "auto":
            return asked
        if self.unserved:
            raise UnsupportedError(
                "the model's own pooling is not served", expected="mean or last", got=self.unserved,
                remedy="ask for one of these by `pooling`",
            )  # fmt: skip
        return self.pooling or "mean"

    def choose_score(self, asked: Literal["auto", "yes-no", "cosine"]) -> ScoreMethod:
        """How two texts are scored. Raises UnsupportedError where the model was trained for neither way.

        Args:
            asked: what the user wants; auto: what the model was trained for.
        """
        if asked != "auto":
            return asked
        if self.reranker:
            return "yes-no"
        if self.pooling is not None or self.unserved:
            return "cosine"
        raise UnsupportedError(
            "this model was trained neither as a reranker nor for embeddings",
            remedy="set the option score_method to yes-no or cosine to score with it all the same",
        )

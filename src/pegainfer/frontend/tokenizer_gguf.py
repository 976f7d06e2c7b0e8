"""A tokenizer rebuilt from a GGUF file's metadata, equal to the Hugging Face one that it was made from.

The metadata comes as a mapping with the file's keys: scalars, and sequences for arrays.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from pegainfer.contract.errors import ModelFileError, UnsupportedError
from pegainfer.frontend.pre_tokenizers import PRE_TOKENIZERS
from pegainfer.frontend.spelling import SPACE_MARK
from pegainfer.frontend.tokenizer import TextConfig, Tokenizer
from pegainfer.frontend.tokenizer_files import add_ends

log = logging.getLogger(__name__)

UNUSED_ROLES = ("padding", "unknown")  # texts are never padded, and the vocabulary marks the unknown token
# Numbers of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Control tokens that end a text, a turn or a message in well-known formats. A file names one EOS, while
# generation_config.json of the same model may name several.
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<｜end▁of▁sentence｜>", "<EOT>", "< EOT >", "_<EOT>", "<|return|>", "<|call|>", "</s>",
)  # fmt: skip


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises ModelFileError where keys are missing or contradict each other, UnsupportedError where the
    file's tokenizer is of a kind that is not known here.
    """
    model = metadata.get("tokenizer.ggml.model")
    vocabulary = _Vocabulary(metadata)
    if model == "gpt2":
        backend, bos_default = _build_bpe(metadata, vocabulary)
    elif model == "llama":
        backend, bos_default = _build_sentencepiece(metadata, vocabulary), True
    else:
        raise UnsupportedError(
            "the file's tokenizer model is not supported",
            expected="tokenizer.ggml.model gpt2 or llama",
            got=model,
            remedy="use a folder with tokenizer.json",
        )
    _add_special(backend, vocabulary)
    config = _text_config(metadata, vocabulary)
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", bos_default)
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    if adds_bos or adds_eos:
        bos, eos = config.special_tokens.get("bos_token"), config.special_tokens.get("eos_token")
        add_ends(backend, bos if adds_bos else None, eos if adds_eos else None)
    return Tokenizer(backend, config)


class _Vocabulary:
    """Tokens with ids and types, checked against each other."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.tokens: list[str] = list(_sequence(metadata, "tokens"))
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise ModelFileError(
                "the vocabulary holds a token twice", expected=len(self.tokens), got=len(self.ids)
            )
        types = metadata.get("tokenizer.ggml.token_type")
        self.types: list[int] = [NORMAL] * len(self.tokens) if types is None else list(types)
        self._unusual = [(i, t) for i, t in enumerate(self.types) if t != NORMAL]
        if len(self.types) != len(self.tokens):
            raise ModelFileError(
                "tokenizer.ggml.token_type has another length than tokens",
                expected=len(self.tokens),
                got=len(self.types),
            )

    def of_type(self, *types: int) -> list[str]:
        """Tokens of types other than NORMAL, by id."""
        return [self.tokens[i] for i, t in self._unusual if t in types]

    def named_id(self, metadata: Mapping[str, Any], name: str) -> int | None:
        """tokenizer.ggml.<name>_token_id, checked; None where the file has none.

        An id of a role that nothing here uses may be wrong, as many files have it: that is a warning.
        """
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            if name in UNUSED_ROLES:
                log.warning(
                    "tokenizer.ggml.%s_token_id is no token: expected < %d, got %r; it is not used",
                    name, len(self.tokens), value,
                )  # fmt: skip
                return None
            raise ModelFileError(
                f"tokenizer.ggml.{name}_token_id is no token", expected=f"< {len(self.tokens)}", got=value
            )
        return value


def _build_bpe(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer without its special tokens, and whether BOS is put in front by default."""
    name = metadata.get("tokenizer.ggml.pre")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise UnsupportedError(
            "the file's pre-tokenizer is not supported",
            expected=f"tokenizer.ggml.pre in {' '.join(PRE_TOKENIZERS)}",
            got=name,
            remedy="use a folder with tokenizer.json, or convert the model anew",
        )
    merges = [tuple(m.split(" ")) for m in _sequence(metadata, "merges")]
    backend = _bpe(vocab=vocabulary.ids, merges=merges, ignore_merges=pre.whole_words)
    if pre.nfc:
        backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = pre.split()
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend, pre.adds_bos


def _build_sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: the pair that makes the token with the best score is merged first."""
    scores = [float(s) for s in _sequence(metadata, "scores")]
    if len(scores) != len(vocabulary.tokens):
        raise ModelFileError(
            "tokenizer.ggml.scores has another length than tokens",
            expected=len(vocabulary.tokens),
            got=len(scores),
        )
    unknown = vocabulary.of_type(UNKNOWN)
    backend = _bpe(
        vocab=vocabulary.ids,
        merges=_merges_from_scores(vocabulary, scores),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    normalizers = tokenizers.normalizers
    marks = [normalizers.Prepend(SPACE_MARK)] if prefix else []
    backend.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", SPACE_MARK)])
    decoders = tokenizers.decoders
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_from_scores(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, ...]]:
    """Every way to join two tokens into a third, best score first; ties in transformers' order."""
    ids, found = vocabulary.ids, []
    for token, i in ids.items():
        if vocabulary.types[i] not in (NORMAL, USER_DEFINED):
            continue  # control tokens are never made from text
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-scores[i], i, ids[left], ids[right], left, right))
    found.sort(key=lambda m: m[:4])
    return [(left, right) for *_, left, right in found]


def _bpe(vocab: dict[str, int], merges: Sequence[tuple[str, ...]], **options: Any) -> tokenizers.Tokenizer:
    pairs: Any = merges  # that each has two parts is the library's check
    try:
        return tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=pairs, **options))
    except Exception as e:  # the library raises Exception itself
        wrong = next((m for m in merges if len(m) != 2 or not {*m, "".join(m)} <= vocab.keys()), None)
        raise ModelFileError(
            "vocabulary and merges do not fit",
            expected="merges of two tokens into a third",
            got=f"{e!s:.100}" if wrong is None else f"{' '.join(wrong)!r:.100}",
        ) from None


def _add_special(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Makes control tokens special, and user-defined ones whole words."""
    added = tokenizers.AddedToken
    backend.add_special_tokens(
        [added(t, special=True, normalized=False) for t in vocabulary.of_type(CONTROL, UNKNOWN)]
    )
    backend.add_tokens([added(t, special=False, normalized=False) for t in vocabulary.of_type(USER_DEFINED)])


def _text_config(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> TextConfig:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {key: vocabulary.named_id(metadata, name) for name, key in names.items()}
    ends = [ids["eos_token"], *(vocabulary.named_id(metadata, n) for n in ("eot", "eom"))]
    control = set(vocabulary.of_type(CONTROL))
    ends += [vocabulary.ids[t] for t in ENDS if t in control]
    template = metadata.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."  # then the name of a further template, such as tool_use
    return TextConfig(
        bos_token_id=ids["bos_token"],
        eos_token_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        special_tokens={key: vocabulary.tokens[i] for key, i in ids.items() if i is not None},
        chat_template=template if isinstance(template, str) else None,
        named_templates={
            key.removeprefix(prefix): value
            for key, value in metadata.items()
            if key.startswith(prefix) and isinstance(value, str)
        },
    )


def _sequence(metadata: Mapping[str, Any], name: str) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None or isinstance(value, str | int | float):
        raise ModelFileError(
            f"tokenizer.ggml.{name} is missing",
            expected="an array",
            got=value,
            remedy="use a file that holds its tokenizer, or a folder with tokenizer.json",
        )
    return value

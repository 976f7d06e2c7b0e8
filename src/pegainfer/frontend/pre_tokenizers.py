"""How the tokenizers of model families cut a text into words before BPE, by their names in GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import tokenizers

_GPT2 = tokenizers.pre_tokenizers.ByteLevel
_WORDS_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_QWEN2 = _WORDS_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_WORDS_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
# As Qwen2's, but combining marks belong to a word.
_WORDS_QWEN3_5 = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"""
    r"""| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
# Cased letters of some scripts, as DeepSeek's tokenizer.json lists them for its models before V3.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Kimi's words: Han by itself; other letters, upper case first and lower case last, so that fooBar is two.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_WORD = r"[^\r\n\p{L}\p{N}]?%s(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORDS_KIMI = "|".join(
    (
        r"\p{Han}+",
        _KIMI_WORD % f"{_UPPER}*{_LOWER}+",
        _KIMI_WORD % f"{_UPPER}+{_LOWER}*",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_WORDS_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


class PreTokenizer(msgspec.Struct, frozen=True):
    """How a text is cut into words before BPE. The cuts' source is the models' own tokenizer.json."""

    split: Callable[[], tokenizers.pre_tokenizers.PreTokenizer]
    nfc: bool = False  # Unicode is composed first
    whole_words: bool = False  # a word that is a token needs no merges
    adds_bos: bool = False  # where the file does not say


def _splits(*patterns: str, digits: bool = False) -> Callable[[], tokenizers.pre_tokenizers.PreTokenizer]:
    """Cuts by each pattern in turn and around digits if so, then maps bytes to GPT-2's alphabet."""

    def make() -> tokenizers.pre_tokenizers.PreTokenizer:
        kinds = tokenizers.pre_tokenizers
        parts = [kinds.Split(tokenizers.Regex(p), "isolated") for p in patterns]
        single = [kinds.Digits(individual_digits=True)] if digits else []
        return kinds.Sequence([*parts, *single, _GPT2(add_prefix_space=False, use_regex=False)])

    return make


def _gpt2_words() -> tokenizers.pre_tokenizers.PreTokenizer:
    return _GPT2(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2_words() -> tokenizers.pre_tokenizers.PreTokenizer:
    return tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(individual_digits=True), _gpt2_words()]
    )


_SMOLLM = PreTokenizer(_digits_then_gpt2_words)
_LLAMA3 = PreTokenizer(_splits(_WORDS_LLAMA3), whole_words=True, adds_bos=True)
_QWEN2 = PreTokenizer(_splits(_WORDS_QWEN2), nfc=True)
_QWEN3_5 = PreTokenizer(_splits(_WORDS_QWEN3_5), nfc=True)
_DEEPSEEK3 = PreTokenizer(_splits(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _WORDS_DEEPSEEK3))
_DEEPSEEK_LLM = PreTokenizer(
    _splits(
        r"[\r\n]",
        rf"\s?[{_DEEPSEEK_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _CJK,
        digits=True,
    )
)
_DEEPSEEK_CODER = PreTokenizer(_splits(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, digits=True))
# By tokenizer.ggml.pre.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "gpt-2": PreTokenizer(_gpt2_words),
    "phi-2": PreTokenizer(_gpt2_words),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN3_5,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK3,
    "kimi-k2": PreTokenizer(_splits(_WORDS_KIMI), whole_words=True),
    # llama.cpp's cuts for files whose converter did not know the model.
    "default": PreTokenizer(_splits(r"[\p{P}\$\+<=>\^~\|]+", _WORDS_GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}

"""From what a request asks for to llguidance's grammar, checked against the vocabulary. Runs in a worker."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pegainfer.contract.errors import RequestError
from pegainfer.frontend.grammar.schema import prepared

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Between two tokens of JSON: a few blanks, or a new line with its indent. Unbounded runs would let a model
# write blanks for ever.
WHITESPACE = r"([ \t]{1,4}|\r?\n[ \t]{0,40})"

MAX_CHOICES = 4096  # of a request
MAX_ROW_ITEMS, MAX_STEP_ITEMS = 2 * MAX_CHOICES, 30_000  # see `new_matcher`

_SPELT_FREELY = '%llguidance {"no_forcing": true}\n'

Kind = Literal["json_schema", "regex", "choice", "lark", "structural_tag"]


class GrammarJob(msgspec.Struct, frozen=True, tag="grammar"):
    """A grammar to check.

    text: a schema, a tag's description or a list of choices as JSON; a regular expression; a grammar.
    """

    kind: Kind
    text: str
    around: str = ""  # Lark source whose start refers to the grammar as @body; empty: nothing
    open_objects: bool = False  # objects may have other properties, where a schema does not say


def compile_grammar(job: GrammarJob, tokenizer: LLTokenizer) -> str:
    """The grammar in llguidance's form. Raises RequestError that says what is wrong with it."""

    try:
        text = _convert(job)
        if job.around:
            text = _wrap(text, job.around)
        text = _spelt_freely(text)
    except RequestError:
        raise
    except Exception as error:  # the library's own readers raise what they like
        raise RequestError("the grammar cannot be read", got=_short(str(error))) from None
    matcher = new_matcher(tokenizer, text)
    if not matcher.is_error():
        mask = matcher.compute_bitmask()
        if not matcher.is_error() and any(mask):
            return text
        if not matcher.is_error() or "NoExtension" in matcher.get_error():
            raise RequestError("the grammar allows no text at all")
    raise RequestError("the grammar does not compile", got=_short(matcher.get_error()))


def new_matcher(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """Of a grammar in llguidance's form, under the same bounds wherever it is made. Ask `is_error`.

    A row of the parser takes any list of choices that a request may have; the library's own bound is 2,000.
    That on a step's items, 50,000 in the library, is what an ambiguous grammar comes to: its masks, for which
    the whole batch waits, take 0.2 s then in place of 0.57 s (49,152 tokens, an AMD EPYC).
    """
    import llguidance

    limits = llguidance.LLParserLimits(max_items_in_row=MAX_ROW_ITEMS, step_max_items=MAX_STEP_ITEMS)
    return llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)


def _convert(job: GrammarJob) -> str:
    from llguidance import LLMatcher, StructTag, grammar_from

    match job.kind:
        case "json_schema":
            schema = json.loads(job.text)
            if isinstance(schema, dict):
                schema = prepared(schema, closed=not job.open_objects)
            return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=json_options())
        case "regex":
            return LLMatcher.grammar_from_regex(job.text)
        case "choice":
            options = " | ".join(json.dumps(text) for text in json.loads(job.text))
            return LLMatcher.grammar_from_lark(f"start: {options}")
        case "lark":
            return grammar_from("grammar", job.text)
        case "structural_tag":
            return StructTag.to_grammar(_tags(json.loads(job.text), job.open_objects), assume_special=False)


def _wrap(text: str, around: str) -> str:
    """Both as one grammar of llguidance, the outer one first."""
    inner = _parts(text)
    inner[0]["name"] = "body"
    return json.dumps({"grammars": [{"name": "around", "lark_grammar": around}, *inner]})


def _spelt_freely(text: str) -> str:
    """The grammar with every tokenisation of what it allows, text without a choice included.

    There the library would allow one token, the first of how our tokenizer cuts the text up to the next
    choice; that is computed for each mask, and vocabulary.py cuts into bytes.
    """
    if not text.lstrip().startswith("{"):
        return _SPELT_FREELY + text
    if not _parts(text)[0].get("lark_grammar"):
        text = _wrap(text, "start: @body")
    grammars = _parts(text)
    grammars[0]["lark_grammar"] = _SPELT_FREELY + grammars[0]["lark_grammar"]
    return json.dumps({"grammars": grammars})


def _parts(text: str) -> list[dict[str, Any]]:
    """The grammars of one in llguidance's form, the first of which refers to the others."""
    if not text.lstrip().startswith("{"):
        return [{"lark_grammar": text}]
    grammars: list[dict[str, Any]] = json.loads(text)["grammars"]
    return grammars


def json_options() -> Any:
    return {"whitespace_pattern": WHITESPACE, "lenient": False}


def _tags(description: dict[str, Any], open_objects: bool) -> list[Any]:
    from llguidance import StructTag

    triggers: list[str] = description["triggers"]
    out = []
    for structure in description["structures"]:
        begin: str = structure["begin"]
        trigger = max((t for t in triggers if begin.startswith(t)), key=len, default=None)
        if trigger is None:
            raise RequestError(
                "a structure of the grammar begins with none of the triggers", got=_short(begin)
            )
        schema = prepared(structure["schema"], closed=not open_objects)
        schema = {**schema, "x-guidance": json_options()}
        out.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=structure["end"]))
    return out


def _short(message: str) -> str:
    """The library's message without its dump of the parser's state, on one line."""
    return " ".join(message.split("<state>")[0].split())[:400]

"""What the types do not say of a request's fields: what they mean, their bounds, their defaults in force."""

from __future__ import annotations

from typing import Any

from pegainfer.contract.request import INT32_MAX, NUMBERS
from pegainfer.frontend.http.config import HttpConfig

Schema = dict[str, Any]

ABOUT = {
    **{name: number.about for name, number in NUMBERS.items()},
    "add_generation_prompt": "begin the assistant's turn in the prompt; default true",
    "add_special_tokens": "put the tokenizer's own tokens around the text",
    "allowed_token_ids": "nothing else is drawn",
    "background": "answer at once and go on in the background",
    "bad_words": "texts that are never drawn",
    "cache_salt": "cached prefixes are shared only among requests of the same salt",
    "chat_template_kwargs": "variables of the template, of those that the server allows",
    "continue_final_message": "go on with the last message instead of answering it",
    "enable_thinking": "whether to think, where the model's template knows it",
    "echo": "the prompt's text before the answer",
    "ignore_eos": "go on after the model's end-of-text token",
    "include_stop_str_in_output": "show the stop string that ended the answer",
    "logit_bias": "token id → what is added to its logit",
    "logprobs": "log-probabilities of the answer's tokens",
    "max_completion_tokens": "longest answer; the newer name of max_tokens; -1: up to the context's end",
    "max_output_tokens": "longest answer; absent or -1: up to the context's end",
    "max_tokens": "longest answer; the context's end may come before; -1: up to there",
    "messages": "the conversation so far",
    "min_tokens": "do not end before so many tokens",
    "model": "a served name; may be left out",
    "n": "answers for each prompt",
    "parallel_tool_calls": "false: one call at the most",
    "previous_response_id": "a stored response to go on from",
    "priority": "lower runs first",
    "prompt_logprobs": "log-probabilities of the prompt's tokens, with so many alternatives",
    "reasoning_effort": "how long to think, where the model's template knows it",
    "request_id": "for /v1/abort, and in the answer's id",
    "response_format": "text, any JSON, or JSON of a schema",
    "return_token_ids": "token ids beside the texts",
    "seed": "equal seeds draw equally; -1: none",
    "skip_special_tokens": "default true",
    "stop": "strings that end the answer",
    "stop_sequences": "strings that end the answer",
    "stop_token_ids": "token ids that end the answer",
    "store": "keep the response for later requests; default true",
    "stream": "the answer as server-sent events",
    "structured_outputs": "a JSON schema, regex, choice, grammar or structural tag that the answer obeys",
    "timeout": "seconds until the request is given up with 504",
    "thinking_budget": "as thinking_token_budget",
    "thinking_token_budget": "tokens that the model may think before it must answer; -1: any number",
    "tool_choice": "none, auto, required, or a tool by name; the last two are enforced",
    "tools": "functions that the model may call",
    "top_logprobs": "alternatives for each token",
    "truncate_prompt_tokens": "keep only so many of the prompt's last tokens",
    "user": "written to the debug log with the request's id",
}


def bounds(config: HttpConfig) -> dict[str, Schema]:
    """Of fields that mean the same on every route, as JSON schema has them."""
    limit: Schema = {"minimum": -1, "maximum": INT32_MAX, "not": {"const": 0}}
    numbers: dict[str, Schema] = {
        name: {"exclusiveMinimum" if n.above else "minimum": n.low, "maximum": n.high}
        for name, n in NUMBERS.items()
    }
    return {
        **numbers,
        "max_completion_tokens": limit,
        "max_output_tokens": limit,
        "min_tokens": {"minimum": 0, "maximum": INT32_MAX},
        "n": {"minimum": 1, "maximum": config.max_n},
        "priority": {"minimum": -INT32_MAX, "maximum": INT32_MAX},
        "request_id": {"pattern": r"^[\x21-\x7e]{1,128}$"},
        "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
        "timeout": {"exclusiveMinimum": 0, "maximum": config.max_timeout_seconds},
        "truncate_prompt_tokens": {"minimum": 1},
    }

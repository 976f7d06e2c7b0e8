"""What the types do not say of a request's fields: what they mean, their bounds, their defaults in force."""

from __future__ import annotations

from typing import Any

from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.fields import INT32_MAX

Schema = dict[str, Any]

ABOUT = {
    "add_generation_prompt": "begin the assistant's turn in the prompt; default true",
    "add_special_tokens": "put the tokenizer's own tokens around the text",
    "allowed_token_ids": "nothing else is drawn",
    "background": "answer at once and go on in the background",
    "bad_words": "texts that are never drawn",
    "cache_salt": "cached prefixes are shared only among requests of the same salt",
    "chat_template_kwargs": "variables of the template, of those that the server allows",
    "continue_final_message": "go on with the last message instead of answering it",
    "echo": "the prompt's text before the answer",
    "frequency_penalty": "taken off a token's logit for each time it was generated",
    "ignore_eos": "go on after the model's end-of-text token",
    "include_stop_str_in_output": "show the stop string that ended the answer",
    "logit_bias": "token id → what is added to its logit",
    "logprobs": "log-probabilities of the answer's tokens",
    "max_completion_tokens": "longest answer; the newer name of max_tokens; -1: up to the context's end",
    "max_output_tokens": "longest answer; absent or -1: up to the context's end",
    "max_tokens": "longest answer; the context's end may come before; -1: up to there",
    "messages": "the conversation so far",
    "min_p": "drop tokens less likely than this share of the likeliest",
    "min_tokens": "do not end before so many tokens",
    "model": "a served name; may be left out",
    "n": "answers for each prompt",
    "parallel_tool_calls": "false: one call at the most",
    "presence_penalty": "taken off the logit of a token that was generated before",
    "previous_response_id": "a stored response to go on from",
    "priority": "lower runs first",
    "prompt_logprobs": "log-probabilities of the prompt's tokens, with so many alternatives",
    "reasoning_effort": "how long to think, where the model's template knows it",
    "repetition_penalty": "divides the logits of tokens that were there before; 1 is off",
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
    "temperature": "0 always takes the likeliest token",
    "timeout": "seconds until the request is given up with 504",
    "tool_choice": "none, auto, required, or a tool by name; the last two are enforced",
    "tools": "functions that the model may call",
    "top_k": "draw among the k likeliest; 0 and -1 are off",
    "top_logprobs": "alternatives for each token",
    "top_p": "draw among the likeliest that reach this mass",
    "truncate_prompt_tokens": "keep only so many of the prompt's last tokens",
    "user": "written to the debug log with the request's id",
}


def bounds(config: HttpConfig) -> dict[str, Schema]:
    """Of fields that mean the same on every route, as JSON schema has them."""
    limit: Schema = {"minimum": -1, "maximum": INT32_MAX, "not": {"const": 0}}
    return {
        "frequency_penalty": {"minimum": -2, "maximum": 2},
        "max_completion_tokens": limit,
        "max_output_tokens": limit,
        "min_p": {"minimum": 0, "maximum": 1},
        "min_tokens": {"minimum": 0, "maximum": INT32_MAX},
        "n": {"minimum": 1, "maximum": config.max_n},
        "presence_penalty": {"minimum": -2, "maximum": 2},
        "priority": {"minimum": -INT32_MAX, "maximum": INT32_MAX},
        "repetition_penalty": {"minimum": 0.01, "maximum": 100},
        "request_id": {"pattern": r"^[\x21-\x7e]{1,128}$"},
        "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
        "temperature": {"minimum": 0, "maximum": 100},
        "timeout": {"exclusiveMinimum": 0, "maximum": config.max_timeout_seconds},
        "top_k": {"minimum": -1, "maximum": INT32_MAX},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "truncate_prompt_tokens": {"minimum": 1},
    }

"""Everything that can be set about the HTTP front. The command line's flags are derived from these fields."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pegainfer.contract.errors import ConfigError

KEY_VARIABLE = "PEGAINFER_API_KEY"
ADMIN_KEY_VARIABLE = "PEGAINFER_ADMIN_KEY"
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@]+")
_METRICS_PREFIX = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?")
MAX_SECONDS = 1e9  # of a flag: timers take no infinity
_HOST = re.compile(r"[A-Za-z0-9._:-]+")


def _flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """Raises ConfigError where two values contradict each other or one is out of its range."""

    host: str = _flag("127.0.0.1", "Address to listen on.")
    port: int = _flag(8000, "Port to listen on; 0 takes a free one.")
    ssl_certfile: str = _flag("", "Certificate chain (PEM): the server then speaks HTTPS.")
    ssl_keyfile: str = _flag("", "Its private key (PEM), where that is not in the same file.")
    served_model_name: tuple[str, ...] = _flag((), "Names that requests may use; the first one is answered.")
    api_key: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata={
            "help": "Keys that clients must show as a bearer token, or sha256: and the digest of one; also "
            f"${KEY_VARIABLE}."
        },
    )
    api_key_file: str = _flag("", "File with such keys, one a line.")
    admin_key: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata={
            "help": "Keys that may do what any key may, and end others' requests and change the server; also "
            f"${ADMIN_KEY_VARIABLE}."
        },
    )
    lora_modules: tuple[str, ...] = _flag(
        (), "LoRA adapters to load at the start: name=path, or JSON with name and path."
    )
    lora_root: str = _flag("", "Folder below which adapters may be loaded by request; none without it.")
    allowed_origin: tuple[str, ...] = _flag(
        (), "Pages of other sites that may use this server, as https://chat.example.org; * allows all."
    )
    allowed_host: tuple[str, ...] = _flag(
        (), "Names by which this server may be reached beside localhost and addresses; * allows all."
    )
    page: bool = _flag(True, "Serve the chat page at / and the dashboard at /dashboard.")
    open_page: bool = _flag(False, "Serve the page's files without a key; what it asks for still needs one.")
    access_log: str = _flag("", "File for one JSON line a request; - is standard output.")
    otlp_traces_endpoint: str = _flag(
        "", "URL that OpenTelemetry spans of requests are sent to, as http://localhost:4318/v1/traces."
    )
    trace: str = _flag(
        "",
        "Folder for traces: steps and requests are recorded, and the last ones written when the server ends.",
    )
    cache_salt_per_key: bool = _flag(True, "Requests of different keys share no cached prefixes.")
    openai_defaults: bool = _flag(False, "Completions default to OpenAI's max_tokens 16 and temperature 1.")
    generation_config: Literal["none", "auto"] = _flag(
        "auto", "auto: sampling defaults to what the model itself says (generation_config.json)."
    )
    override_generation_config: str = _flag(
        "", 'JSON object of sampling defaults that go before the model\'s own, as {"temperature": 0.2}.'
    )
    chat_template_kwargs: tuple[str, ...] = _flag(
        ("enable_thinking",), "Template variables that requests may set."
    )
    open_objects: bool = _flag(
        False, "Objects of a schema may have further properties where it does not say additionalProperties."
    )
    request_chat_template: bool = _flag(False, "Let requests bring a chat template of their own.")
    tool_call_parser: str = _flag("auto", "How the model writes tool calls; auto: by its chat template.")
    reasoning_parser: str = _flag("auto", "How it marks its thoughts: think, none; auto: by its template.")
    pooling: Literal["auto", "mean", "last"] = _flag(
        "auto",
        "How /v1/embeddings makes one vector of a text's hidden states; auto: as the model's files say, else "
        "by their mean.",
    )
    score_method: Literal["auto", "yes-no", "cosine"] = _flag(
        "auto",
        "How /v1/score and /v1/rerank compare two texts; auto: as the model was trained to. yes-no: its "
        "answer to a question, as Qwen3-Reranker; cosine: of the angle between embeddings.",
    )
    metrics_prefix: str = _flag("pegainfer:", "Prefix of the metrics' names; 'vllm:' fits vLLM's dashboards.")

    keep_alive_seconds: float = _flag(10.0, "A silent stream gets a comment this often.")
    idle_connection_seconds: float = _flag(75.0, "An unused connection is closed after this long.")
    header_seconds: float = _flag(30.0, "A connection must send its whole request header within this time.")
    body_seconds: float = _flag(60.0, "Longest silence in the middle of a request body.")
    write_seconds: float = _flag(60.0, "A stream whose client reads nothing for so long is dropped.")
    ready_seconds: float = _flag(30.0, "/ready is red when a busy engine made no step for this long.")
    engine_restarts: int = _flag(
        1, "How often an engine process that died is replaced; without any left the server ends."
    )
    drain_seconds: float = _flag(600.0, "At shutdown, running requests get this long to finish.")

    max_body_bytes: int = _flag(16 << 20, "Longest request body.")
    max_held_bytes: int = _flag(1 << 30, "Bytes of the bodies of all requests that are being answered.")
    max_logprobs_bytes: int = _flag(1 << 30, "Most memory that the logprobs of one answer may come to take.")
    max_header_bytes: int = _flag(64 << 10, "Longest request header, request line included.")
    max_json_depth: int = _flag(64, "Deepest nesting of a request body.")
    max_queued_requests: int = _flag(1024, "Prompts waiting for their first token.")
    max_queued_tokens: int = _flag(1 << 23, "Tokens of the prompts waiting for their first token.")
    max_n: int = _flag(128, "Most continuations of a prompt.")
    max_prompts: int = _flag(1024, "Most prompts in one completion request.")
    max_counted_chars: int = _flag(
        4 << 20,
        "Longest text that is tokenised to be counted or truncated, in characters; never less than four a "
        "token of the model's context.",
    )
    max_stop_strings: int = _flag(16, "Most stop strings of a request.")
    max_stop_bytes: int = _flag(1024, "Longest stop string, in bytes of UTF-8.")
    max_logprobs: int = _flag(20, "Most alternatives a token in logprobs.")
    max_logit_bias: int = _flag(1024, "Most entries of logit_bias, stop_token_ids and bad_words.")
    max_grammar_bytes: int = _flag(256 << 10, "Longest schema, grammar or regular expression of a request.")
    grammar_seconds: float = _flag(5.0, "A grammar that takes longer to compile is refused.")
    template_seconds: float = _flag(5.0, "A chat that takes longer to render is refused.")
    worker_processes: int = _flag(
        2, "Processes that compile grammars and render long chats; started when needed."
    )
    max_kept_prompt_bytes: int = _flag(
        80 << 20, "Most memory for what prompts were tokenised to, so that it is not done again."
    )
    max_stored_responses: int = _flag(1000, "Most answers of /v1/responses that are kept in memory.")
    max_stored_bytes: int = _flag(256 << 20, "Most memory for them, as JSON.")
    stored_seconds: float = _flag(3600.0, "How long each of them is kept.")
    max_timeout_seconds: float = _flag(86400.0, "Longest timeout that a request may ask for.")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("no such port", expected="0 to 65535", got=self.port, where="--port")
        if self.engine_restarts < 0:
            raise ConfigError(
                "no such number of restarts", expected="0 or more", got=self.engine_restarts,
                where="--engine-restarts",
            )  # fmt: skip
        if not _METRICS_PREFIX.fullmatch(self.metrics_prefix):
            raise ConfigError(
                "no prefix of metrics", expected="letters, digits, _ and :, no digit first",
                got=self.metrics_prefix, where="--metrics-prefix",
            )  # fmt: skip
        # Imported here: it loads the tokenizer's library, which `--help` should not wait for.
        from pegainfer.frontend.adapter_calls import parse_module
        from pegainfer.frontend.tools.styles import check_style, choose_reasoning

        for text in self.lora_modules:
            parse_module(text)
        check_style(self.tool_call_parser)
        choose_reasoning(self.reasoning_parser, None)
        self._check_limits()
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("a private key without a certificate", remedy="add --ssl-certfile")
        if self.open_page and not self.page:
            raise ConfigError("there is no page to open", got="--open-page beside --no-page")
        self._check_access()

    def _check_limits(self) -> None:
        from pegainfer.frontend.detokenize import MAX_STOP_BYTES, MAX_STOP_STRINGS

        for name in (*_POSITIVE, "drain_seconds"):
            value, flag = getattr(self, name), "--" + name.replace("_", "-")
            if value <= 0 and (name in _POSITIVE or value < 0):
                raise ConfigError("a limit must be above 0", got=value, where=flag)
            if name.endswith("_seconds") and not value <= MAX_SECONDS:  # NaN is none, either
                raise ConfigError("no such time", expected=f"≤ {MAX_SECONDS:g} s", got=value, where=flag)
        for name, top in (("max_stop_strings", MAX_STOP_STRINGS), ("max_stop_bytes", MAX_STOP_BYTES)):
            if not 0 <= getattr(self, name) <= top:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(
                    "no such limit", expected=f"0 to {top}", got=getattr(self, name), where=flag
                )
        if self.max_body_bytes > self.max_held_bytes:
            raise ConfigError(
                "one request could hold more than all may", got=self.max_body_bytes,
                expected=f"max_body_bytes ≤ max_held_bytes = {self.max_held_bytes}",
            )  # fmt: skip
        if self.max_prompts > self.max_queued_requests:
            raise ConfigError(
                "one request could fill more than the queue",
                expected=f"max_prompts ≤ max_queued_requests = {self.max_queued_requests}",
                got=self.max_prompts,
            )

    def _check_access(self) -> None:
        from pegainfer.frontend.http.connection.keys import digests

        for origin in self.allowed_origin:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    "no origin of pages", expected="scheme://host or scheme://host:port, without a path",
                    got=origin, where="--allowed-origin",
                )  # fmt: skip
        for host in self.allowed_host:
            if host != "*" and not _HOST.fullmatch(host):
                raise ConfigError(
                    "no host name", expected="a name without scheme and port", got=host,
                    where="--allowed-host",
                )  # fmt: skip
        for flag, keys in (("--api-key", self.api_key), ("--admin-key", self.admin_key)):
            if any(not key or key != key.strip() for key in keys):
                raise ConfigError("a key is empty or has blanks around it", where=flag)
            digests(keys)

    @property
    def page_is_open(self) -> bool:
        """Whether a browser, which brings no key, gets the page's files."""
        return self.page and (self.open_page or not self.api_key)

    def with_environment(self, environ: Mapping[str, str]) -> HttpConfig:
        """The same with the keys of the environment, separated by blanks, and of the key file.

        They are for keys that a command line would show to other users.

        Raises ConfigError for a file that holds no key.
        """
        from pegainfer.frontend.http.connection.keys import read_keys

        keys = environ.get(KEY_VARIABLE, "").split()
        keys += read_keys(self.api_key_file) if self.api_key_file else ()
        admin = environ.get(ADMIN_KEY_VARIABLE, "").split()
        return dataclasses.replace(self, api_key=(*self.api_key, *keys), admin_key=(*self.admin_key, *admin))


_POSITIVE = (
    "keep_alive_seconds",
    "idle_connection_seconds",
    "header_seconds",
    "body_seconds",
    "write_seconds",
    "ready_seconds",
    "max_body_bytes",
    "max_held_bytes",
    "max_logprobs_bytes",
    "max_header_bytes",
    "max_json_depth",
    "max_queued_requests",
    "max_queued_tokens",
    "max_n",
    "max_prompts",
    "max_counted_chars",
    "max_logprobs",
    "max_timeout_seconds",
    "max_grammar_bytes",
    "grammar_seconds",
    "template_seconds",
    "worker_processes",
    "max_kept_prompt_bytes",
    "max_stored_responses",
    "max_stored_bytes",
    "stored_seconds",
)

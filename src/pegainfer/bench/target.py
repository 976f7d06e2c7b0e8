"""The server under test: its address, and what can be asked of it before the run."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from pegainfer.bench.config import ENDPOINTS, ServerConfig
from pegainfer.contract.errors import ConfigError

ASK_SECONDS = 10.0
RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class Target:
    host: str
    port: int
    tls: bool
    verify: bool
    prefix: str  # path before every route
    endpoint: str
    headers: dict[str, str]

    @classmethod
    def of(cls, config: ServerConfig) -> Target:
        """Raises ConfigError for an address or a header that is none."""
        url = config.base_url or f"http://{config.host}:{config.port}"
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query:
            raise ConfigError("an address", expected="http[s]://host[:port]", got=url, where="--base-url")
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        key = os.environ.get("OPENAI_API_KEY")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        for item in config.header:
            name, equals, value = item.partition("=")
            if not equals or not name.strip() or not (name + value).isprintable():
                raise ConfigError("a header", expected="KEY=VALUE", got=item, where="--header")
            headers[name.strip()] = value
        tls = parts.scheme == "https"
        return cls(
            host=parts.hostname,
            port=port or (443 if tls else 80),
            tls=tls,
            verify=not config.insecure,
            prefix=parts.path.rstrip("/").removesuffix("/v1"),
            endpoint="/" + (config.endpoint or ENDPOINTS[config.api]).lstrip("/"),
            headers=headers,
        )

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}{self.prefix}"

    def path(self, route: str) -> str:
        return self.prefix + route

    def head(self) -> bytes:
        """Request line and headers of a generation, without its length."""
        lines = [f"POST {self.path(self.endpoint)} HTTP/1.1", f"Host: {self.host}:{self.port}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return ("\r\n".join(lines) + "\r\n").encode("utf-8")

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        """A connection that opens itself with the first request."""
        if not self.tls:
            return http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        context = ssl.create_default_context()
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return http.client.HTTPSConnection(self.host, self.port, timeout=timeout, context=context)

    def first_model(self, patience: float) -> str | None:
        """The first of /v1/models, None where the server has no such list.

        Args:
            patience: seconds to wait for a server that does not listen yet.

        Raises:
            ConfigError: nothing answers.
        """
        until = time.monotonic() + patience
        while True:
            try:
                return self._ask_models()
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() >= until:
                    raise ConfigError(
                        "no server answers",
                        got=getattr(error, "strerror", None) or str(error) or type(error).__name__,
                        where=self.url,
                        remedy="start it, or give --base-url",
                    ) from error
            time.sleep(RETRY_SECONDS)

    def _ask_models(self) -> str | None:
        connection = self.connect(ASK_SECONDS)
        try:
            headers = {n: v for n, v in self.headers.items() if n != "Content-Type"}
            connection.request("GET", self.path("/v1/models"), headers=headers)
            answer = connection.getresponse()
            raw = answer.read()
        finally:
            connection.close()
        if answer.status == 401:
            raise ConfigError("the server wants a key", got="status 401", where=self.url,
                              remedy="set OPENAI_API_KEY, or give --header Authorization=...")  # fmt: skip
        try:
            return str(json.loads(raw)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            return None

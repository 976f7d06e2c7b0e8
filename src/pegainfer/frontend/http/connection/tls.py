"""HTTPS by the server itself; behind a reverse proxy it is not needed."""

from __future__ import annotations

import ssl

from pegainfer.contract.errors import ConfigError
from pegainfer.frontend.http.config import HttpConfig


def check_certificate(config: HttpConfig) -> None:
    """Reads certificate and key as the server will. Raises ConfigError where it could not use them."""
    if not config.ssl_certfile:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    where = "--ssl-certfile " + config.ssl_certfile
    if config.ssl_keyfile:
        where += " --ssl-keyfile " + config.ssl_keyfile

    def no_password() -> str:
        raise ConfigError(
            "the private key is encrypted", where=where,
            remedy="decrypt it (openssl pkey -in key.pem -out plain.pem); let only the server read it",
        )  # fmt: skip

    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None, no_password)
    except ssl.SSLError as e:
        raise ConfigError(
            "certificate and private key cannot be used", got=e.reason or str(e), where=where,
            expected="PEM files that belong together",
        ) from None  # fmt: skip
    except OSError as e:
        raise ConfigError(f"cannot read the certificate or its key: {e.strerror}", where=where) from None

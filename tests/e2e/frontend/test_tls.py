"""The server speaks HTTPS with a certificate of its own, and says what is wrong with one it cannot use."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.server import pega, serving

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def certificate(folder: Path, name: str, *options: str) -> tuple[Path, Path]:
    """A self-signed one for 127.0.0.1, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", *(options or ["-nodes"]),
         "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_https(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "a")
    flags = ("--device", "null", "--ssl-certfile", str(cert), "--ssl-keyfile", str(key))
    with serving(*flags) as server:
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=server.url, verify=trusted) as client:
            answer = client.post("/v1/completions", json={"model": "null", "prompt": "hi", "max_tokens": 3})
            assert answer.status_code == 200 and len(answer.json()["choices"][0]["text"]) == 3
            stream = {"model": "null", "prompt": "hi", "max_tokens": 3, "stream": True}
            with client.stream("POST", "/v1/completions", json=stream) as lines:
                assert list(lines.iter_lines())[-2:] == ["data: [DONE]", ""]
        with pytest.raises(httpx.TransportError):  # plain HTTP gets nothing
            httpx.get(server.url.replace("https", "http") + "/health")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(server.url + "/health")
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(cert)
        with pytest.warns(DeprecationWarning):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.ConnectError), httpx.Client(verify=old) as client:
            client.get(server.url + "/health")


def test_one_file_may_hold_both(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "a")
    both = tmp_path / "both.pem"
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    with serving("--device", "null", "--ssl-certfile", str(both)) as server:
        verify = ssl.create_default_context(cafile=str(cert))
        assert httpx.get(server.url + "/health", verify=verify).status_code == 200


def test_what_cannot_be_used(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "a")
    _, other = certificate(tmp_path, "b")
    _, secret = certificate(tmp_path, "c", "-passout", "pass:word")
    missing = tmp_path / "none.pem"
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("hello")
    cases = {
        ("--ssl-certfile", str(cert), "--ssl-keyfile", str(other)): "cannot be used",
        ("--ssl-certfile", str(cert), "--ssl-keyfile", str(secret)): "the private key is encrypted",
        ("--ssl-certfile", str(missing)): "No such file or directory",
        ("--ssl-certfile", str(nonsense)): "cannot be used",
        ("--ssl-certfile", str(cert)): "cannot be used",  # without its key
        ("--ssl-keyfile", str(key)): "a private key without a certificate",
    }
    for flags, said in cases.items():
        done = pega("serve", "--device", "null", "--port", "0", *flags)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, flags

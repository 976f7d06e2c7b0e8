"""What clients of a server need: a server of the null device and one of the default model, and the client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.support.default_model import default_model
from tests.support.server import Server, serving


@pytest.fixture(scope="module", params=["null", "smollm2"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Serves the model as `m`. A module may have a server of its own instead."""
    model = ["--device", "null"] if request.param == "null" else [str(default_model())]
    with serving(*model, "--served-model-name", "m") as process:
        yield process


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client

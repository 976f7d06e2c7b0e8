"""docs/api.md anew, from the OpenAPI document of a server with default settings: python -m tools.api_docs"""

from __future__ import annotations

from pathlib import Path

from pegainfer.frontend.http.api_docs.markdown import to_markdown
from tests.support.asgi import ask
from tests.support.fake_engine import FakeEngine

if __name__ == "__main__":
    document = ask(FakeEngine(), "/openapi.json").json()
    (Path(__file__).parents[1] / "docs" / "api.md").write_text(to_markdown(document))

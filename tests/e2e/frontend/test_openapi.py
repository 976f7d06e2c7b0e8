"""Any request that the OpenAPI document allows or forbids, at a real server: nothing undocumented comes back.

PEGAINFER_API_EXAMPLES=200 makes it thorough.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx

from tests.support.server import serving

EXAMPLES = os.environ.get("PEGAINFER_API_EXAMPLES", "8")  # of each operation, valid and broken ones each
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_schema_conformance", "negative_data_rejection", "unsupported_method",
)  # fmt: skip
# A timeout of a nanosecond passes: that is no fault of the server's.
CONFIG = '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "4xx", 504]\n'


def test_every_operation_keeps_its_description(tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    with serving("--device", "null", "--max-model-len", "256") as server:
        command = [
            Path(sys.executable).with_name("schemathesis"), "--config-file", "schemathesis.toml", "run",
            f"{server.url}/openapi.json", "--mode", "all", "--max-examples", EXAMPLES, "--seed", "2",
            "--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing,stateful", "--no-color",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr
        (operations,) = re.findall(r"Tested: +(\d+)", done.stdout)
        described = httpx.get(f"{server.url}/openapi.json").json()["paths"]
        assert int(operations) == sum(len(methods) for methods in described.values()) - 1  # the document
        load = httpx.get(f"{server.url}/load").json()
        assert (load["server_load"], load["running"], load["waiting"]) == (0, 0, 0)
        assert load["free_blocks"] == load["total_blocks"]
        assert "Traceback" not in server.errors.read_text()

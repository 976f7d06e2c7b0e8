"""What stands in deploy/ names flags, variables and metrics that exist."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pegainfer.cli.flags import flag_of
from pegainfer.contract.event import EngineStats
from pegainfer.frontend.http.config import KEY_VARIABLE, HttpConfig
from pegainfer.frontend.http.connection.auth import OPEN_PATHS
from pegainfer.runtime.user_cache import CACHE_VARIABLE
from tests.support.asgi import ask
from tests.support.fake_engine import FakeEngine

DEPLOY = Path(__file__).parents[2] / "deploy"


def exported() -> set[str]:
    """Names of metrics, those that several ranks have among them."""
    engine = FakeEngine()
    engine.set_stats(EngineStats(rank_seconds=(1.0, 2.0)))
    return set(re.findall(r"^# TYPE (\S+) ", ask(engine, "/metrics").text, re.MULTILINE))


def test_pages_name_metrics_that_are_exported() -> None:
    known = {name.removeprefix("pegainfer:") for name in exported()}
    for page, few in (("serving.md", 6), ("deploying.md", 5)):
        words = re.findall(r"`([a-z_]+)(?:\{\w+\})?`", (DEPLOY.parent / "docs" / page).read_text())
        named = {w for w in words if re.search(r"_(total|seconds)$|^num_requests_", w)}
        assert len(named) >= few and named <= known, named - known


def test_the_dashboard_draws_metrics_that_are_exported() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "pegainfer.json").read_text())
    targets = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    assert len(targets) >= 20
    known = exported()
    for expr in targets:
        for name in re.findall(r"pegainfer:\w+", expr):
            assert re.sub(r"_(bucket|sum|count)$", "", name) in known, expr


def test_files_for_servers_name_flags_and_variables_that_exist() -> None:
    flags = {flag_of(f) for f in dataclasses.fields(HttpConfig)}
    # Of docker, apt, pip and useradd; and --arch and --folder of `pegainfer kernels build`.
    foreign = {"--arch", "--build-arg", "--create-home", "--folder", "--from", "--gpus", "--interval"}
    foreign |= {"--no-cache-dir", "--no-install-recommends", "--now", "--rm", "--start-period", "--time"}
    foreign |= {"--uid", "--from-literal", "--no-deps"}
    text = "\n".join(p.read_text() for p in DEPLOY.iterdir() if p.is_file())
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert {"--host", "--port", "--access-log", "--drain-seconds", "--max-body-bytes"} <= named
    assert named - foreign <= flags | {"--device"}
    variables = set(re.findall(r"PEGAINFER_[A-Z_]+", text))
    assert variables == {CACHE_VARIABLE, KEY_VARIABLE}


def test_what_a_container_fetches_goes_to_its_volume() -> None:
    image = (DEPLOY / "Dockerfile").read_text()
    (volume,) = re.findall(r"^VOLUME (\S+)$", image, re.MULTILINE)
    assert dict(re.findall(rf"\b(HF_HOME|{CACHE_VARIABLE})=(\S+)", image)) == {
        "HF_HOME": f"{volume}/hub",
        CACHE_VARIABLE: f"{volume}/cache",
    }


def manifests() -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


def test_kubernetes_runs_the_image_as_it_was_built() -> None:
    image = (DEPLOY / "Dockerfile").read_text()
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert f"EXPOSE {container['ports'][0]['containerPort']}\n" in image
    assert f"VOLUME {container['volumeMounts'][0]['mountPath']}\n" in image
    assert f"--uid {pod['securityContext']['runAsUser']} " in image
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert container["env"][0]["name"] == KEY_VARIABLE
    assert pod["terminationGracePeriodSeconds"] > HttpConfig().drain_seconds


def test_kubernetes_probes_routes_that_answer_without_a_key() -> None:
    (container,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        target = container[probe]["httpGet"]
        assert target["path"].encode() in OPEN_PATHS
        assert target["port"] == container["ports"][0]["name"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"  # 503 while it loads or drains
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"  # not restarted for being busy


def test_kubernetes_sends_the_services_traffic_to_the_server() -> None:
    found = manifests()
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == labels
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    (claim,) = (
        v["persistentVolumeClaim"]["claimName"]
        for v in found["Deployment"]["spec"]["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in v
    )
    assert claim == found["PersistentVolumeClaim"]["metadata"]["name"]


def test_kubernetes_knows_every_field_of_the_manifests() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for manifest in manifests().values():
        validator.validate(manifest, "1.31", strict=True)
        with pytest.raises(validator.ValidationError):
            validator.validate({**manifest, "spec": {**manifest["spec"], "replica": 1}}, "1.31", strict=True)

"""Which differences between two engines give their KV tiers different digests."""

from __future__ import annotations

from pathlib import Path

from pegainfer.app.config import EngineConfig
from pegainfer.app.tier_stores import content_digest
from pegainfer.kv.device.layout import PageLayout, Part
from pegainfer.ops.ranks import TensorRank


def test_blocks_of_another_cache_format_are_never_found(tmp_path: Path) -> None:
    """Also where another shape gives a block as many bytes."""
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(100))
    shapes = {"f32": (4, 16), "f16": (8, 16), "fp8": (16, 16)}
    digests = set()
    for kv, shape in shapes.items():
        config = EngineConfig(kv_dtype=kv)
        for given in {shape, shapes["f32"]}:
            groups = (PageLayout("kv", (Part("kv", given, config.kv_format),), 16),)
            digests.add(content_digest(config, groups, model, TensorRank(0, 1)))
            assert content_digest(config, groups, model, TensorRank(0, 1)) in digests
    assert len(digests) == 5


def test_ranks_with_whole_experts_have_blocks_of_their_own(tmp_path: Path) -> None:
    """Their sums add up other parts, so the same tokens leave other bits."""
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(100))
    groups = (PageLayout("kv", (Part("kv", (4, 16), "f32"),), 16),)
    ranks = [TensorRank(1, 2), TensorRank(1, 2, whole_experts=True), TensorRank(0, 2), TensorRank(1, 4)]
    assert len({content_digest(EngineConfig(), groups, model, at) for at in ranks}) == 4

"""How programs run on the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Values of the padding rows and tokens of a graph: no slot, place, state, adapter, mask or logprobs; 0 for
# all other inputs.
# Inputs of a KV group are named <group>.<name>.
PADDING: dict[str, int] = dict.fromkeys(
    ("slots", "places", "state_ids", "state_saves", "adapters", "logit_adapters", "mask_rows", "top_lens"), -1
)


@dataclass(frozen=True)
class CudaOptions:
    """How programs run on the GPU.

    Args:
        graphs: replay captured graphs; without, steps are launched one kernel at a time.
        tune: time cuBLASLt's algorithms at capture, rather than take the heuristic's first.
        row_pass: a step of one decoded row is one launch, where a kernel serves it.
        padding: what padding holds, by input name without its KV group; other inputs hold 0 there.
    """

    graphs: bool = True
    tune: bool = True
    row_pass: bool = True
    padding: Mapping[str, int] = field(default_factory=lambda: dict(PADDING))

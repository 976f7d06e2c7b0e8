"""The weights of a toy hybrid model, and the rotation's table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pegainfer.ops.rope import cos_sin_table, inverse_frequencies
from pegainfer.ops.weights import WeightTable, entry, in_layer, plan_weights
from pegainfer.runtime.weights.tensorfile import TensorFile
from pegainfer.runtime.weights.weight import Weight, float32
from tests.support.toyhybrid.config import ToyConfig

TABLE = WeightTable(
    line="toy",
    embed=entry("embed", "model.embed_tokens.weight", "", ("vocab_size", "hidden_size")),
    others=(entry("norm", "model.norm.weight", "", ("hidden_size",)),),
    head=entry("lm_head", "lm_head.weight", "", ("vocab_size", "hidden_size")),
    layer=(
        in_layer("mix_norm", "mix_norm", "", ("hidden_size",)),
        in_layer("w_qkv", "mix.qkv", "", ("conv_size", "hidden_size")),
        in_layer("w_gate_out", "mix.gate", "", ("delta_size", "hidden_size")),
        in_layer("w_a", "mix.a", "", ("delta_heads", "hidden_size")),
        in_layer("w_b", "mix.b", "", ("delta_heads", "hidden_size")),
        in_layer("taps", "mix.conv", "", ("conv_width", "conv_size")),
        in_layer("a_log", "mix.a_log", "", ("delta_heads",)),
        in_layer("dt_bias", "mix.dt_bias", "", ("delta_heads",)),
        in_layer("out_norm", "mix.norm", "", ("delta_dim",)),
        in_layer("w_out", "mix.out", "", ("hidden_size", "delta_size")),
        in_layer("attn_norm", "attn_norm", "", ("hidden_size",)),
        in_layer("wq", "attn.q", "", ("q_size", "hidden_size")),
        in_layer("wk", "attn.k", "", ("kv_size", "hidden_size")),
        in_layer("wv", "attn.v", "", ("kv_size", "hidden_size")),
        in_layer("wo", "attn.o", "", ("hidden_size", "q_size")),
        in_layer("mlp_norm", "mlp_norm", "", ("hidden_size",)),
        in_layer("w_gate", "mlp.gate", "", ("intermediate_size", "hidden_size")),
        in_layer("w_up", "mlp.up", "", ("intermediate_size", "hidden_size")),
        in_layer("w_down", "mlp.down", "", ("hidden_size", "intermediate_size")),
    ),
)


@dataclass(frozen=True)
class ToyWeights:
    """A model's weights as its file holds them, by the forward's name."""

    config: ToyConfig
    tensors: Mapping[str, Weight]

    def cos_sin(self, num_positions: int) -> Weight:
        """The rotation's table: [num_positions, D] f32."""
        return float32(cos_sin_table(num_positions, inverse_frequencies(self.config.head_dim, 1e4, None)))


def load_safetensors(config: ToyConfig, file: TensorFile) -> ToyWeights:
    """Maps the tensors of a checkpoint. Raises ModelFileError, UnsupportedError."""
    return ToyWeights(config, plan_weights(TABLE, config, file, "hf"))

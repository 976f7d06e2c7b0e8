"""Operands that the ops between logits and tokens share."""

from __future__ import annotations

from pegainfer.ops.fill import constant, seeds
from pegainfer.ops.spec import INTS, In, Out, State

F32 = ("f32",)

ADJUST = (
    In("bias_ids", "J", INTS, into="V"),  # distinct within a row
    In("bias_values", "J", F32, fill=constant(0)),
    In("bias_starts", "L", INTS),
    In("bias_lens", "L", INTS, neutral=0),
    # I = ceil(vocab_size / 32); bit v % 32 of word v // 32 set: token v may be drawn
    In("masks", "E I", ("u32",)),
    In("mask_rows", "L", INTS, into="E", neutral=-1),  # which mask; -1: none
    In("banned_tokens", "U", INTS, into="V"),  # sequences that must not be completed, laid end to end
    # Sequence o is banned_tokens[start .. start + len], len ≥ 1; a single token is banned in any case.
    In("banned_seq_starts", "O", INTS),
    In("banned_seq_lens", "O", INTS),
    In("banned_starts", "L", INTS),  # row l's sequences are banned_starts[l] .. + banned_lens[l]
    In("banned_lens", "L", INTS, neutral=0),
    State("history", "Z X", INTS, into="V"),
    In("slots", "L", INTS, into="Z"),  # distinct
    In("history_lens", "L", INTS),  # known tokens of the row, those of the prompt included
    In("prompt_lens", "L", INTS),
    In("repetition_penalty", "L", F32, neutral=1),
    In("frequency_penalty", "L", F32, neutral=0),
    In("presence_penalty", "L", F32, neutral=0),
)
DRAW = (
    In("temperature", "L", F32, neutral=0),  # below 2^-20: greedy
    In("top_k", "L", INTS, neutral=0),
    In("top_p", "L", F32, neutral=1),
    In("min_p", "L", F32, neutral=0),
    In("seeds", "L", ("u64",), fill=seeds),
    In("draws", "L", INTS),  # tokens that the row has generated so far
)
TOKENS = (
    Out("tokens", "L", INTS),  # 0 where status is not 0: a valid id, should a following step read it
    Out("status", "L", INTS),
)
LOGPROBS = (
    Out("logprobs", "L", F32),  # NaN where the row holds NaN or +inf, is all -inf, or targets no token
    Out("ranks", "L", INTS),  # 1: first in the order (logit descending, id ascending)
    Out("top_ids", "L K", INTS),  # -1 past top_lens[l]
    Out("top_logprobs", "L K", F32),
)

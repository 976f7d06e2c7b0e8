"""How the KV cache's memory is divided among pages, states and snapshots."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pegainfer.app.memory import Division, Wish, divide, sequence_bytes, state_bytes
from pegainfer.contract.errors import ConfigError
from pegainfer.kv.device.layout import GroupLayout, PageLayout, Part, StateLayout

KV = PageLayout("kv", (Part("kv", (100,), "f32"),), block_size=16)  # 400 bytes a block
NEAR = PageLayout("near", (Part("near", (50,), "f32"),), block_size=16, window=64)  # 200 bytes a block
COARSE = PageLayout("coarse", (Part("coarse", (25,), "f32"),), block_size=128)  # 100 bytes a block
STATE = StateLayout("gdn", (Part("delta", (200,), "f32"), Part("conv", (100,), "f16")), 64)  # 1,000 bytes
WISH = Wish(
    slots=8, slots_asked=False, length=160, length_asked=False, step_tokens=128, snapshot_share=0.25
)  # fmt: skip


def test_pages_alone_take_everything() -> None:
    assert divide((KV,), 12_399, WISH) == Division(8, 160, (30,))


def test_what_one_sequence_needs() -> None:
    assert sequence_bytes((KV,), 161) == 11 * 400
    # Five blocks hold any 64 tokens that follow each other.
    assert sequence_bytes((KV, NEAR, COARSE, STATE), 160) == 10 * 400 + 5 * 200 + 2 * 100 + 1000
    assert state_bytes((KV, STATE)) == 1000


def test_states_of_running_sequences_come_first_then_the_share_of_snapshots() -> None:
    """8 states; of the 12,000 bytes that are left, a quarter for snapshots."""
    assert divide((KV, STATE), 20_000, WISH) == Division(8, 160, (22, 8 + 3))


def test_every_state_group_has_as_many_states() -> None:
    other = StateLayout("other", (Part("other", (250,), "f32"),), 64)
    assert divide((STATE, KV, other), 32_000, WISH) == Division(8, 160, (8 + 2, 30, 8 + 2))


@pytest.mark.parametrize("groups", [(KV, replace(STATE, snapshot_every=0)), (KV, STATE)])
def test_no_snapshots_where_none_can_be_kept(groups: tuple[GroupLayout, ...]) -> None:
    share = WISH.snapshot_share if groups[1] is not STATE else 0.0
    assert divide(groups, 20_000, replace(WISH, snapshot_share=share)).num_blocks == (30, 8)


def test_one_sequence_comes_before_snapshots() -> None:
    """4,500 bytes beside the states; one sequence needs 4,000 of them, the share would be 2,250."""
    wish = replace(WISH, snapshot_share=0.5)
    assert divide((KV, STATE), 12_500, replace(wish, slots_asked=True)).num_blocks == (11, 8)


def test_states_without_pages_take_everything() -> None:
    assert divide((STATE,), 20_500, WISH) == Division(8, 160, (20,))


def test_the_default_number_of_sequences_is_lowered_to_what_half_of_the_memory_holds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert divide((KV, STATE), 10_000, WISH).slots == 5
    assert "max_slots lowered to 5" in caplog.text
    with pytest.raises(ConfigError, match=r"states of max_slots sequences.*MiB for 8 sequences"):
        divide((KV, STATE), 7_999, replace(WISH, slots_asked=True))


def test_all_page_groups_hold_the_same_tokens() -> None:
    # 16 tokens take 400 bytes and an eighth of 100: 48 blocks and 6 coarse ones.
    assert divide((KV, COARSE), 48 * 400 + 6 * 100 + 399, WISH).num_blocks == (48, 6)


def test_a_window_takes_no_more_than_twice_what_sequences_can_hold() -> None:
    most = 2 * (8 * 5 + 8)
    assert divide((KV, NEAR), 1_000_000, WISH).num_blocks == ((1_000_000 - most * 200) // 400, most)
    assert divide((KV, NEAR), 60 * 600, WISH).num_blocks == (60, 60)


def test_a_default_is_no_larger_than_wanted() -> None:
    assert divide((KV,), 1 << 40, replace(WISH, most_tokens=1000)).num_blocks == (63,)
    assert divide((KV,), 1 << 40, replace(WISH, most_tokens=100)).num_blocks == (10,)  # one sequence


@pytest.mark.parametrize("groups", [(KV,), (KV, NEAR)])
def test_a_length_that_was_asked_for_must_fit(groups: tuple[GroupLayout, ...]) -> None:
    memory = 5 * sum(400 if g is KV else 200 for g in groups)
    assert divide(groups, memory, WISH).length == 80
    with pytest.raises(ConfigError, match=r"one sequence of max_model_len.*for 160 tokens; got .*here;"):
        divide(groups, memory, replace(WISH, length_asked=True), where=" here")
    with pytest.raises(ConfigError, match="one sequence of max_model_len"):
        divide(groups, 399, WISH)

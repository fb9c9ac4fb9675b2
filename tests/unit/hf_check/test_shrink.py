"""Small configs keep what selects the code of a family, and the equations between its sizes."""

import pytest

from pipemega.hf_check import shrink
from pipemega.hf_check.shrink import Needs, edits


def shrunk(needs=None, **values):
    list(edits(values, needs or Needs()))
    return values


def test_heads_widths_and_sizes_of_heads_shrink_by_common_factors():
    small = shrunk(
        Needs(tensor=2),
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        hidden_size=8192,
        intermediate_size=28672,
    )
    assert small["num_attention_heads"] == 16
    assert small["num_key_value_heads"] == 2
    assert small["hidden_size"] == small["num_attention_heads"] * small["head_dim"] == 128
    assert small["intermediate_size"] == 28672 // 64


def test_the_size_of_heads_need_not_follow_from_the_width():
    """gpt-oss: 64 heads of 64 channels, and a width of 2880."""
    small = shrunk(num_attention_heads=64, num_key_value_heads=8, head_dim=64, hidden_size=2880)
    assert (small["num_attention_heads"], small["head_dim"], small["hidden_size"]) == (16, 8, 90)


def test_one_key_and_value_head_for_all_queries_remains_one():
    small = shrunk(num_attention_heads=32, num_key_value_heads=1, head_dim=64, hidden_size=2048)
    assert small["num_key_value_heads"] == 1
    assert small["num_attention_heads"] == 4


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_a_size_is_divisible_by_the_tensor_ranks_if_the_users_is(tensor):
    small = shrunk(
        Needs(tensor=tensor), num_attention_heads=40, num_key_value_heads=8, hidden_size=5120,
        intermediate_size=13696,
    )  # fmt: skip
    assert small["num_key_value_heads"] % tensor == 0
    assert small["num_attention_heads"] % tensor == 0
    assert small["intermediate_size"] % tensor == 0


def test_as_many_layers_remain_as_show_every_kind_of_layer():
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 4
    small = shrunk(num_hidden_layers=24, layer_types=kinds)
    assert small["num_hidden_layers"] == 6
    assert small["layer_types"] == kinds[:6]


def test_layers_that_begin_after_the_first_few_remain():
    assert shrunk(num_hidden_layers=61, first_k_dense_replace=3)["num_hidden_layers"] == 4


def test_every_stage_gets_a_layer():
    assert shrunk(Needs(layers=8), num_hidden_layers=32)["num_hidden_layers"] == 8


def test_special_tokens_remain_different_and_inside_the_vocabulary():
    small = shrunk(
        vocab_size=128256, bos_token_id=128000, eos_token_id=[128001, 128008], pad_token_id=0
    )
    ids = [small["bos_token_id"], *small["eos_token_id"]]
    assert len(set(ids)) == 3
    assert max(ids) < small["vocab_size"] == shrink.VOCABULARY
    assert small["pad_token_id"] == 0


def test_sections_of_rotary_channels_shrink_with_the_heads():
    rope = {"rope_type": "default", "mrope_section": [16, 24, 24]}
    small = shrunk(num_attention_heads=16, head_dim=128, hidden_size=2048, rope_parameters=rope)
    assert sum(small["rope_parameters"]["mrope_section"]) == small["head_dim"] // 2


def test_rope_scaling_and_its_factors_per_channel_remain():
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [2.0] * 48,
        "original_max_position_embeddings": 4096,
    }
    small = shrunk(num_attention_heads=32, hidden_size=3072, rope_parameters=rope)
    head_dim = small["hidden_size"] // small["num_attention_heads"]
    assert small["rope_parameters"]["rope_type"] == "longrope"
    assert len(small["rope_parameters"]["long_factor"]) == head_dim // 2


def test_experts_stay_in_their_groups():
    small = shrunk(n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4)
    assert small == {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}


def test_nested_configs_shrink_under_their_own_keys():
    values = {"text_config": {"model_type": "llama", "num_hidden_layers": 32}}
    (change,) = edits(values, Needs())
    assert change == ("text_config.num_hidden_layers", 32, 2)


def test_dropout_is_switched_off():
    small = shrunk(attention_dropout=0.1, resid_pdrop=0.1, num_dropouts=2)
    assert small == {"attention_dropout": 0.0, "resid_pdrop": 0.0, "num_dropouts": 2}


class Config:
    """Stands for a config of transformers that refuses some sizes."""

    model_type = "test"

    def __init__(self, values):
        self.values = values

    def to_dict(self):
        return dict(self.values)

    @classmethod
    def from_dict(cls, values):
        if values["hidden_size"] < 512:
            raise ValueError("hidden_size must be at least 512")
        return cls(values)


def test_changes_with_which_the_model_fails_are_left_out():
    config = Config({"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32})
    small, changes = shrink.shrink(config, Needs(), lambda _: True)
    assert small.values["hidden_size"] == 4096
    assert [change.key for change in changes] == ["num_hidden_layers"]


def test_nothing_is_returned_if_no_model_of_the_family_works():
    config = Config({"num_hidden_layers": 32, "hidden_size": 4096})
    assert shrink.shrink(config, Needs(), lambda _: False) == (None, ())

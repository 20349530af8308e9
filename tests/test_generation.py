"""Sampling with a prompt that is run once: the same tokens as the library's own call, whatever the cache."""
from collections import Counter

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

import comlrl_nb.generation as generation
from comlrl_nb.generation import RoomyLayer, Sampling, generate_rows, plain_generation_config
from comlrl_nb.logprobs import prefill
from comlrl_nb.shared_prompt import SharedPromptLayer, can_share_prompt
from comlrl_nb.streams import RandomStream
from comlrl_nb.toy import micro_model

SIZE = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)


def sliding():
    return MistralForCausalLM(MistralConfig(**SIZE, sliding_window=8))


def some_layers_sliding():
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZE, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]))


@pytest.mark.parametrize("decoding", [True, False], ids=["own steps", "generate"])
@pytest.mark.parametrize("make, sharing, made", [(lambda: micro_model(seed=0), True, SharedPromptLayer), (lambda: micro_model(seed=0), False, RoomyLayer), (sliding, True, None), (some_layers_sliding, True, None)])
def test_a_prompt_run_once_gives_the_librarys_tokens_and_room_only_where_all_layers_grow(make, sharing, made, decoding, monkeypatch):
    counts = Counter()
    for kind in (SharedPromptLayer, RoomyLayer):
        monkeypatch.setattr(kind, "__init__", lambda self, *args, begin=kind.__init__: (counts.update([type(self)]), begin(self, *args))[1])
    if not sharing:
        monkeypatch.setattr(generation, "can_share_prompt", lambda model, cache: False)
    if not decoding:
        monkeypatch.setattr(generation, "can_decode", lambda model: False)
    torch.manual_seed(0)
    model, keywords = make().eval(), Sampling(max_new_tokens=10).keywords()
    can_share_prompt(model, prefill(model, torch.tensor([[3, 4]]), torch.ones(1, 2, dtype=torch.bool)).cache)  # its trial makes layers, too
    counts.clear()
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :5] = False
    with torch.no_grad(), plain_generation_config(model, [2], 0, None):
        with RandomStream(0, "s").on("cpu"):
            expected = model.generate(input_ids=ids, attention_mask=mask.long(), num_return_sequences=3, **keywords).sequences
        with RandomStream(0, "s").on("cpu"):
            found = generate_rows(model, ids, mask, 3, keywords)
    assert torch.equal(found, expected) and counts == ({made: 2} if made else {})

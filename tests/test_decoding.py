"""The package's own decoding step draws the library's tokens, and steps aside for every model that is not what it was written for."""
import functools

import pytest
import torch
import transformers as tf

from comlrl_nb import decoding
from comlrl_nb.decoding import FAMILIES, Decoder, can_decode
from comlrl_nb.generation import Sampling, generate_rows, plain_generation_config
from comlrl_nb.logprobs import pad_left, position_ids, prefill
from test_architectures import LLAMA

ROTATIONS = {"linear": dict(rope_type="linear", factor=2.0), "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
             "llama3": dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
             "dynamic": dict(rope_type="dynamic", factor=2.0)}
BEGIN = tuple(range(3, 23))
PROMPTS = {"one": [BEGIN], "alike": [(*BEGIN, 30, 31), (*BEGIN, 40), BEGIN], "strangers": [(30, 31, 32, 33), (40, 41), BEGIN], "two tokens": [(30, 31)]}


def built(family="llama", dtype=torch.float64, **changes):
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(tf.AutoConfig.for_model(family, **{**LLAMA, "sliding_window": None, **changes})).to(dtype).eval()


def both(model, prompts, num, sampling, ends=(2,), pad=0):
    """The rows of this package and of the library's own call, from one seed."""
    ids, mask = pad_left(prompts, pad)
    found = []
    with torch.no_grad(), plain_generation_config(model, ends, pad, 1):
        for draw in (lambda **keywords: generate_rows(model, ids, mask, num, keywords),
                     lambda **keywords: model.generate(input_ids=ids, attention_mask=mask.long(), num_return_sequences=num, **keywords).sequences):
            torch.manual_seed(1)
            found.append(draw(**sampling.keywords()))
    return found


@pytest.fixture
def decoders(monkeypatch):
    """How many decoders were made."""
    made = []
    monkeypatch.setattr("comlrl_nb.generation.Decoder", lambda *args: made.append(1) or Decoder(*args))
    return made


@pytest.mark.parametrize("sampling", [Sampling(12), Sampling(12, temperature=0.7), Sampling(12, top_k=5), Sampling(12, top_p=0.6), Sampling(12, temperature=1.5, top_p=0.9, top_k=20), Sampling(1)],
                         ids=["plain", "cooler", "top k", "top p", "all three", "one token"])
@pytest.mark.parametrize("prompts", PROMPTS)
def test_the_librarys_tokens(prompts, sampling, decoders):
    model = built()
    for num in (1, 3, 16):
        assert torch.equal(*both(model, PROMPTS[prompts], num, sampling))
    assert len(decoders) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes", [dict(), dict(num_key_value_heads=1), dict(num_key_value_heads=4, head_dim=16), dict(tie_word_embeddings=True, hidden_act="gelu")],
                         ids=["grouped heads", "one key head", "wide heads", "tied"])
def test_every_family(family, dtype, changes, decoders):
    model = built(family, dtype, **changes)
    assert torch.equal(*both(model, PROMPTS["strangers"], 4, Sampling(10))) and decoders == [1]


@pytest.mark.parametrize("biases", [dict(attention_bias=True, mlp_bias=True)])
def test_biases_are_added(biases, decoders):
    model = built(**biases)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
    assert torch.equal(*both(model, PROMPTS["strangers"], 4, Sampling(10))) and decoders == [1]


@pytest.mark.parametrize("kind", ROTATIONS)
def test_a_rotation_that_depends_on_the_length_is_left_to_the_library(kind, decoders):
    model = built(rope_parameters={"rope_theta": 10_000.0, **ROTATIONS[kind]}, max_position_embeddings=64)
    assert torch.equal(*both(model, PROMPTS["one"], 3, Sampling(16)))
    assert decoders == ([] if kind == "dynamic" else [1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_close_as_the_library_is_to_itself(dtype):
    """The library's own cached steps differ from its whole sequences by as much."""
    model = built(dtype=dtype)
    ids, mask = pad_left([tuple(range(3, 20)), tuple(range(30, 40))], 0)
    with torch.no_grad():
        exact = model.float()(input_ids=ids, attention_mask=mask.long(), position_ids=position_ids(mask)).logits[:, 12:]
        model = model.to(dtype)
        assert can_decode(model)
        decoder = Decoder(model, prefill(model, ids[:, :12], mask[:, :12]).cache, mask[:, :12], 5)
        steps, before = [], prefill(model, ids[:, :12], mask[:, :12])
        for place in range(12, 17):
            ours = decoder(ids[:, place])
            theirs = model(input_ids=ids[:, place:place + 1], attention_mask=mask[:, :place + 1].long(), position_ids=position_ids(mask)[:, place:place + 1], use_cache=True,
                           **{before.cache_name: before.cache}).logits[:, -1]
            steps.append([(logits.float() - exact[:, place - 12]).abs().max().item() for logits in (ours, theirs)])
    ours, theirs = (max(column) for column in zip(*steps))
    assert ours < 3 * theirs + 1e-3


CHANGES = ("eager", "adapter", "forward", "forward of a class", "compiled", "hook", "pre-hook", "class", "generate", "generate of the class", "filters", "inputs of the class")


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_sampled_as_it_is(change, decoders, monkeypatch):
    """Whatever was found out before, what somebody has put into a model is run; the model is changed so that it draws other tokens."""
    model = built()
    plain, _ = both(model, PROMPTS["one"], 4, Sampling(10))
    assert decoders == [1]
    down, twice = model.model.layers[-1].mlp, lambda out: out * 50
    if change == "eager":
        model.set_attn_implementation("eager")
    elif change == "adapter":
        class Louder(torch.nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, states):
                return twice(self.inner(states))
        down.down_proj = Louder(down.down_proj)
    elif change == "forward":
        own = down.forward
        down.forward = lambda states: twice(own(states))
    elif change == "forward of a class":
        own = type(down).forward
        monkeypatch.setattr(type(down), "forward", lambda self, states: twice(own(self, states)))
    elif change == "compiled":
        model.compile(backend="eager")
    elif change == "hook":
        down.register_forward_hook(lambda part, inputs, out: twice(out))
    elif change == "pre-hook":
        down.register_forward_pre_hook(lambda part, inputs: tuple(map(twice, inputs)))
    elif change == "class":
        class Mine(tf.LlamaForCausalLM):
            def forward(self, *args, **keywords):
                out = super().forward(*args, **keywords)
                out.logits = out.logits * 50
                return out
        model.__class__ = Mine
    elif change == "generate of the class":
        library = tf.GenerationMixin.generate
        monkeypatch.setattr(tf.GenerationMixin, "generate", lambda self, *args, **keywords: library(self, *args, **{**keywords, "temperature": 0.01}))
    elif change == "filters":
        library = model._get_logits_processor
        model._get_logits_processor = lambda *args, **keywords: tf.LogitsProcessorList([*library(*args, **keywords), tf.TemperatureLogitsWarper(0.01)])
    elif change == "inputs of the class":
        library = tf.LlamaForCausalLM.prepare_inputs_for_generation
        monkeypatch.setattr(tf.LlamaForCausalLM, "prepare_inputs_for_generation", functools.wraps(library)(lambda self, ids, *more, **keywords: library(self, ids.flip(1), *more, **keywords)))
    else:
        library = model.generate
        model.generate = lambda *args, **keywords: library(*args, **{**keywords, "temperature": 0.01})
    found, wanted = both(model, PROMPTS["one"], 4, Sampling(10))
    assert torch.equal(found, wanted) and decoders == [1]
    assert torch.equal(found, plain) == (change in ("eager", "compiled"))


def test_training_mode_and_other_families_are_left_to_the_library():
    assert not can_decode(built().train()) and not can_decode(built("phi3", pad_token_id=0)) and not can_decode(built("mistral", sliding_window=8))


def test_a_checkpoint_that_is_not_like_its_family_is_seen(monkeypatch):
    """The trial decides, whatever the class is called."""
    model = built()
    monkeypatch.setattr(decoding, "rotate", lambda heads, cos, signed_sin: heads)
    assert not can_decode(model)


def test_further_keywords_go_to_the_library(decoders):
    model = built()
    strict = Sampling(10, extra={"repetition_penalty": 5.0})
    found, wanted = both(model, PROMPTS["alike"], 3, strict)
    plain, _ = both(model, PROMPTS["alike"], 3, Sampling(10))
    assert torch.equal(found, wanted) and not torch.equal(found, plain) and decoders == [1]


@pytest.mark.parametrize("ends, pad", [((2,), 0), (tuple(range(0, 64, 2)), 0), (tuple(range(0, 64, 2)), 2), (tuple(range(64)), 3)], ids=["rarely", "often", "padded with an end", "at once"])
def test_rows_that_have_ended_are_padded_and_the_last_one_ends_the_loop(ends, pad):
    found, wanted = both(built(), PROMPTS["strangers"], 4, Sampling(20), ends, pad)
    assert torch.equal(found, wanted)
    assert (found.shape[1] == len(BEGIN) + 1) == (len(ends) == 64)


def test_a_model_that_is_broken_draws_nothing():
    model = built()
    assert can_decode(model)
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(RuntimeError, match="probability tensor contains either `inf`, `nan`"):
        both(model, PROMPTS["one"], 2, Sampling(3))


def test_a_sampled_model_learns_as_before():
    """Nothing that sampling computes stays in the model without its gradient."""
    model = built()
    both(model, PROMPTS["alike"], 3, Sampling(5))
    model(input_ids=torch.tensor([[4, 5, 6]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

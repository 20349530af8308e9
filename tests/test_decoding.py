"""The package's own decoding step draws the library's tokens, and steps aside for every model that is not what it was written for."""
import copy
import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as tf
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

from comlrl_nb import decoding
from comlrl_nb.decoding import FAMILIES, Decoder, can_decode
from comlrl_nb.generation import Sampling, generate_rows, plain_generation_config, sample
from comlrl_nb.logprobs import completion_logprobs, completion_logprobs_naive, pad_left, position_ids, prefill
from comlrl_nb.streams import RandomStream
from comlrl_nb.toy import micro_model, micro_tokenizer
from comlrl_nb.types import Prompt
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


def loud():
    """A model whose weights are so large that every change of its computation changes its tokens."""
    model = built(dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    return model


def wrapped_by_torch(owner, name, patch):
    own = getattr(owner, name)
    patch.setattr(owner, name, torch.no_grad()(lambda self, *args, **keywords: own(self, *args, **keywords) * -3))


ELSEWHERE = {
    "a hook on all modules": lambda model, patch: patch.setitem(torch.nn.modules.module._global_forward_hooks, 0, lambda part, inputs, out: out * 2 if isinstance(part, llama.LlamaRMSNorm) else None),
    "the attention function": lambda model, patch: patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *args, **keywords: (sdpa_attention_forward(*args, **keywords)[0] * -3, None)),
    "one layer's attention": lambda model, patch: other_attention(model),
    "the mask": lambda model, patch: patch.setattr(llama, "create_causal_mask", functools.partial(llama.create_causal_mask, and_mask_function=lambda batch, head, query, key: query - key < 6)),
    "the rotation": lambda model, patch: patch.setattr(llama, "apply_rotary_pos_emb", lambda query, key, *more, **keywords: (query, key)),
    "when to stop": lambda model, patch: stopping_early(model),
    "a layer, by a function in torch's decorator": lambda model, patch: wrapped_by_torch(llama.LlamaDecoderLayer, "forward", patch),
    "how a layer is called": lambda model, patch: wrapped_by_torch(llama.LlamaDecoderLayer, "__call__", patch),
    "the order of layers": lambda model, patch: setattr(model.model, "layers", torch.nn.ModuleList(list(model.model.layers)[::-1])),
    "a norm": lambda model, patch: setattr(model.model, "norm", torch.nn.LayerNorm(32)),
    "the embedding": lambda model, patch: setattr(model.model, "embed_tokens", torch.nn.Sequential(model.model.embed_tokens, torch.nn.Tanh())),
    "a growing rotation": lambda model, patch: setattr(model.model, "rotary_emb", llama.LlamaRotaryEmbedding(tf.LlamaConfig(**LLAMA, max_position_embeddings=8, rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=10_000.0)))),
    "fewer layers than the configuration says": lambda model, patch: setattr(model.model, "layers", model.model.layers[:1]),
    "no word on the rotation in the configuration": lambda model, patch: setattr(model.config, "rope_parameters", None),
}


def other_attention(model):
    tf.AttentionInterface.register("negative", lambda *args, **keywords: (-sdpa_attention_forward(*args, **keywords)[0], None))
    attend = model.model.layers[1].self_attn
    attend.config = copy.deepcopy(attend.config)
    attend.config._attn_implementation = "negative"


def stopping_early(model):
    own = model._get_stopping_criteria
    model._get_stopping_criteria = lambda *args, **keywords: tf.StoppingCriteriaList([*own(*args, **keywords), tf.MaxLengthCriteria(26)])


@pytest.mark.parametrize("tried", [True, False], ids=["tried before", "fresh"])
@pytest.mark.parametrize("place", ELSEWHERE)
def test_what_was_changed_elsewhere_is_seen(place, tried, monkeypatch):
    """In the library's modules, in what it calls, in the structure: the tokens stay those of `generate`."""
    model, prompts = loud(), PROMPTS["one" if place == "a growing rotation" else "alike"]
    if tried:
        plain, _ = both(model, prompts, 4, Sampling(10))
    ELSEWHERE[place](model, monkeypatch)
    model(torch.tensor([range(3, 40)]))  # a growing rotation remembers the longest text it has seen
    found, wanted = both(model, prompts, 4, Sampling(10))
    assert torch.equal(found, wanted)
    if tried and not place.startswith("no word"):
        assert not torch.equal(found, plain)


@pytest.mark.parametrize("place", ["a hook on all modules", "the attention function", "how a layer is called", "the order of layers"])
def test_log_probabilities_follow_such_a_change(place, monkeypatch):
    model, texts, owner = loud().double(), [tuple(range(3, 40)), (7, 8, 9)], [0, 0, 1]
    score = lambda way: way(model, texts, [(4, 5), (6,), (7, 8)], owner).sums()
    score(completion_logprobs)
    ELSEWHERE[place](model, monkeypatch)
    with torch.no_grad():
        assert (score(completion_logprobs) - score(completion_logprobs_naive)).abs().max() < 1e-4


def test_one_part_in_training_mode_is_left_to_the_library():
    model = built(attention_dropout=0.5)
    model.model.layers[0].train()
    assert not can_decode(model)


@pytest.mark.parametrize("extra", [dict(use_cache=False), dict(cache_implementation="static"), dict(cache_implementation="dynamic"), dict(prefix_allowed_tokens_fn=lambda batch, ids: [[3, 4, 5], [6, 7], [8]][batch])], ids=["no cache", "static", "dynamic", "prompt numbers"])
def test_keywords_about_the_cache_and_about_prompts_get_the_ordinary_call(extra):
    model = loud()
    assert torch.equal(*both(model, PROMPTS["strangers"], 4, Sampling(5, extra=extra)))


def test_nothing_is_asked_for():
    with pytest.raises(ValueError, match="max_new_tokens=0: expected at least 1"):
        Sampling(0)


def test_threads_that_sample_one_model_wait_for_one_another():
    """Each gets what it gets alone, with its own end tokens, and the model keeps its settings and its mode."""
    model, tokenizer, config = micro_model(0).train(), micro_tokenizer(), None
    prompts, ends = [Prompt("a", (4, 5, 6)), Prompt("b", (7, 8))], [(2,), tuple(range(0, 64, 5)), (7,)]
    config = model.generation_config
    once = lambda i: sample(model, tokenizer, prompts, 4, Sampling(30), RandomStream(i, "s"), eos_ids=ends[i])
    alone = [once(i) for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            assert list(pool.map(once, range(3))) == alone
    assert model.generation_config is config and all(part.training for part in model.modules())

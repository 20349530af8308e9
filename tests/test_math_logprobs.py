"""Scoring: shared prompts against whole sequences, for many shapes, models and failures."""
import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from comlrl_nb import logprobs, toy
from comlrl_nb.logprobs import (TokenLogprobs, accepted_arguments, completion_logprobs, completion_logprobs_naive, distinct, gather_logprobs,
                                length_groups, pad_left, pad_right, position_ids, prefill, select_rows)

PROMPTS = [(5,), (7, 8, 9, 0, 0, 12, 13), (5, 6, 7), (9, 9, 9, 0)]
COMPLETIONS = [(20, 21, 22, 2), (), (30,), (0, 2, 0), (2,), (40, 41, 42, 43, 44, 45, 2), (), (20, 21, 22, 2), (8, 2)]
OWNER = [1, 1, 3, 1, 1, 3, 0, 1, 1]  # unequal counts; prompt 2 is not used


def gpt2(dtype=torch.float64, **kwargs):
    return toy.micro_model(kind="gpt2", dtype=dtype, **kwargs)


def run(score, model, prompts=PROMPTS, completions=COMPLETIONS, owner=OWNER, **kwargs):
    model.zero_grad()
    scored = score(model, prompts, completions, owner, **kwargs)
    weights = torch.linspace(-1, 2, scored.values.numel(), dtype=scored.values.dtype).view_as(scored.values)
    (weights * scored.values).sum().backward()
    gradient = torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros(p.numel(), dtype=p.dtype) for p in model.parameters()])
    return scored, gradient


def assert_same(model, value, grad=None, **kwargs):
    ours, gradient = run(completion_logprobs, model, **kwargs)
    whole, expected = run(completion_logprobs_naive, model, **kwargs)
    assert torch.equal(ours.mask, whole.mask)
    assert (ours.values - whole.values).abs().max() <= value
    largest = expected.abs().max()
    assert largest > 0 and (gradient - expected).abs().max() <= (grad or value) * max(1, largest)
    return ours


@pytest.fixture
def no_fallback(monkeypatch):
    """Fails the test if `completion_logprobs` scores whole sequences; the oracle itself stays usable."""
    def refuse(*args, **kwargs):
        raise AssertionError("scored whole sequences")
    monkeypatch.setattr(logprobs, "completion_logprobs_naive", refuse)


@pytest.fixture
def fallbacks(monkeypatch):
    seen = []
    monkeypatch.setattr(logprobs, "completion_logprobs_naive", lambda *a, **k: (seen.append(1), completion_logprobs_naive(*a, **k))[1])
    return seen


# --- the oracle against a forward by hand


def test_oracle_equals_one_unpadded_forward_per_row():
    model = gpt2()
    scored = completion_logprobs_naive(model, PROMPTS, COMPLETIONS, OWNER)
    for j, ids in enumerate(COMPLETIONS):
        prompt = PROMPTS[OWNER[j]]
        rows = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
        for t, token in enumerate(ids):
            assert abs(scored.values[j, t] - rows[len(prompt) - 1 + t, token]) < 1e-12
        assert scored.values[j, len(ids):].abs().sum() == 0 and scored.mask[j].sum() == len(ids)


# --- shared prompts


def test_gpt2_float64_is_exact(no_fallback):
    assert_same(gpt2(), 1e-12)


def test_llama_float64(no_fallback):
    assert_same(toy.micro_model(dtype=torch.float64), 1e-12, 1e-6)


@pytest.mark.parametrize("budget", [0, 1, 5, 10**6])
def test_grouping_changes_nothing(monkeypatch, no_fallback, budget):
    monkeypatch.setattr(logprobs, "PADDING_BUDGET", {"cpu": budget})
    assert_same(gpt2(), 1e-12)


def test_batched_equals_alone_in_float32():  # C02
    for model in (gpt2(torch.float32), toy.micro_model()):
        together = completion_logprobs(model, [(5, 6), (7,) * 9], [(20, 21), (20, 21)], [0, 1]).values
        for row, prompt in enumerate([(5, 6), (7,) * 9]):
            alone = completion_logprobs(model, [prompt], [(20, 21)], [0]).values[0]
            assert (together[row] - alone).abs().max() < 1e-5


lists = st.lists(st.integers(0, 60), max_size=6)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_shapes(data):
    prompts = data.draw(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=9), min_size=1, max_size=4))
    completions = data.draw(st.lists(lists, min_size=1, max_size=8))
    owner = data.draw(st.lists(st.integers(0, len(prompts) - 1), min_size=len(completions), max_size=len(completions)))
    budget = data.draw(st.sampled_from([0, 3, 256]))
    model, before = gpt2(), logprobs.PADDING_BUDGET["cpu"]
    logprobs.PADDING_BUDGET["cpu"] = budget
    try:
        ours, whole = (score(model, prompts, completions, owner) for score in (completion_logprobs, completion_logprobs_naive))
    finally:
        logprobs.PADDING_BUDGET["cpu"] = before
    assert torch.equal(ours.mask, whole.mask) and (ours.values - whole.values).abs().max() < 1e-12


def test_only_empty_completions_keep_a_gradient_path(no_fallback):  # C30
    model = gpt2()
    sums = completion_logprobs(model, PROMPTS, [(), ()], [0, 1]).sums()
    sums.sum().backward()
    assert sums.tolist() == [0, 0]
    assert all(p.grad is None or p.grad.abs().sum() == 0 for p in model.parameters())


def test_no_completions():
    assert completion_logprobs(gpt2(), PROMPTS, [], []).values.shape == (0, 1)


def test_only_single_tokens_need_no_second_forward():
    model, calls = gpt2(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    completion_logprobs(model, [(5, 6)], [(7,), (8,)], [0, 0])
    assert len(calls) == 1


def test_duplicates_run_once():
    model, positions = gpt2(), []
    model.transformer.wte.register_forward_hook(lambda module, inputs, output: positions.append(inputs[0].numel()))
    scored = completion_logprobs(model, [(5, 6), (5, 6)], [(7, 8, 9)] * 4, [0, 1, 1, 0])
    assert positions == [2, 2]
    assert all(torch.equal(scored.values[0], row) for row in scored.values)


def test_gradient_of_duplicates_adds_up():
    assert_same(gpt2(), 1e-12, prompts=[(5, 6), (5, 6)], completions=[(7, 8, 9)] * 3, owner=[0, 1, 1])


def test_end_token_equal_to_padding_is_scored():  # C01
    model = gpt2()
    scored = completion_logprobs(model, [(0, 5)], [(7, 8, 0), (0,)], [0, 0], pad_id=0)
    assert scored.mask.tolist() == [[True, True, True], [True, False, False]]
    gradient, = torch.autograd.grad(scored.values[0, 2], model.transformer.wte.weight)
    assert gradient.abs().sum() > 0


def test_the_padding_token_does_not_matter():
    model = gpt2()
    assert torch.equal(*(completion_logprobs(model, PROMPTS, COMPLETIONS, OWNER, pad_id=pad).values for pad in (0, 50)))


def test_no_position_beyond_the_models_last():
    """A short prompt with a short completion beside a long completion: padding must not run out of positions."""
    model = gpt2(n_positions=16)
    prompts, completions = [(5,) * 2, (6,) * 13], [(7,) * 14, (8, 2)]
    assert_same(model, 1e-12, prompts=prompts, completions=completions, owner=[0, 1])


def test_without_gradients():
    with torch.no_grad():
        scored = completion_logprobs(gpt2(), PROMPTS, COMPLETIONS, OWNER)
    assert not scored.values.requires_grad and (scored.values[scored.mask] < 0).all()


def test_gradient_flows_into_the_prompt():
    model = gpt2()
    model.zero_grad()
    completion_logprobs(model, [(31, 32, 33)], [(7, 8, 9)], [0]).values[0, 1:].sum().backward()
    assert (model.transformer.wte.weight.grad[[31, 32]].abs().sum(-1) > 0).all()


def test_ratio_to_itself_is_one_in_training_mode_without_dropout_and_in_eval_mode_with_it():  # C20
    model = toy.micro_model(kind="gpt2", resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1).eval()
    old = completion_logprobs(model, PROMPTS, COMPLETIONS, OWNER).sums().detach()
    order = [3, 0, 8, 5, 1, 2, 4, 6, 7]
    new = completion_logprobs(model, PROMPTS, [COMPLETIONS[j] for j in order], [OWNER[j] for j in order]).sums()
    assert ((new - old[order]).exp() - 1).abs().max() < 1e-5


def test_half_precision_gives_float32():
    scored = completion_logprobs(gpt2(torch.bfloat16), PROMPTS, COMPLETIONS, OWNER)
    assert scored.values.dtype == torch.float32 and scored.values.isfinite().all()


# --- architectures

SMALL = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=48,
             max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, head_dim=16)
WINDOWS = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])
SHARED = {"mistral": dict(sliding_window=4), "qwen2": dict(use_sliding_window=True, sliding_window=4, max_window_layers=1), "qwen3": {},
          "phi3": {}, "gemma3_text": WINDOWS, "opt": dict(ffn_dim=48, word_embed_proj_dim=32), "gpt_neox": {}}
WHOLE = {"lfm2": dict(layer_types=["conv", "full_attention"]),
         "falcon_h1": dict(mamba_d_ssm=32, mamba_n_heads=2, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1),
         "rwkv": dict(attention_hidden_size=32), "bloom": dict(n_head=2, n_layer=2)}


def build(kind, attention, dtype=torch.float64, **fields):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **fields})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).eval()


@pytest.mark.parametrize("kind", SHARED)
def test_architectures_share_prompts(no_fallback, kind):
    assert_same(build(kind, "sdpa", **SHARED[kind]), 1e-10, 5e-6)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "qwen2", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eager_attention(no_fallback, kind, dtype):
    """Rows that are masked throughout would give NaN: such models see prompts of one length at a time."""
    fields = dict(n_embd=32, n_layer=2, n_head=2, n_positions=64) if kind == "gpt2" else SHARED.get(kind, {})
    assert_same(build(kind, "eager", dtype, **fields), 2e-6, 2e-5)


def test_prefill_refuses_left_padding_under_eager_attention():
    model = toy.micro_model(attn_implementation="eager")
    assert prefill(model, *pad_left([(5, 6), (7,)], 0)).cache is None
    assert prefill(model, *pad_left([(5, 6), (7, 8)], 0)).cache is not None


@pytest.mark.parametrize("kind", WHOLE)
def test_other_architectures_are_right(kind):
    assert_same(build(kind, "eager", torch.float32, **WHOLE[kind]), 2e-6, 2e-5)


def test_state_space_model_is_scored_whole(fallbacks):
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=2, pad_token_id=0)).eval()
    assert_same(model, 1e-6, 1e-5)
    assert fallbacks == [1]


# --- caches that cannot be shared


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gradient_checkpointing_in_training_mode(fallbacks, kind):
    model = toy.micro_model(kind=kind, dtype=torch.float64)
    plain, expected = run(completion_logprobs_naive, model)
    model.gradient_checkpointing_enable()
    model.train()
    scored, gradient = run(completion_logprobs, model)
    assert fallbacks == [1]
    assert (scored.values - plain.values).abs().max() < 1e-12 and (gradient - expected).abs().max() < 1e-6
    model.eval()
    assert_same(model, 1e-12, 1e-6)
    assert fallbacks == [1]


class Wrapped(nn.Module):
    """A causal model whose prompt forward returns what `spoil(cache)` makes of its cache."""

    def __init__(self, spoil):
        super().__init__()
        self.model, self.spoil, self.config = gpt2(), spoil, None

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, use_cache=None, logits_to_keep=0):
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=cache,
                         use_cache=use_cache, logits_to_keep=logits_to_keep)
        if cache is None and use_cache:
            out.cache = self.spoil(out.cache)
        return out


def shortened(cache):
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]
    return cache


def with_more_state(cache):
    cache.layers[1].conv_states = {0: torch.zeros(3, 2)}
    return cache


def test_the_wrapper_alone_shares(no_fallback):
    ours, _ = run(completion_logprobs, Wrapped(lambda cache: cache))
    assert ours.values.isfinite().all()


@pytest.mark.parametrize("spoil", [lambda cache: None, shortened, with_more_state, lambda cache: ("keys", "values")])
def test_spoiled_caches_are_noticed(fallbacks, spoil):
    assert_same(Wrapped(spoil), 1e-12)
    assert fallbacks == [1]


class Bare(nn.Module):
    """A model that takes ids and nothing else."""

    def __init__(self):
        super().__init__()
        self.model = gpt2()

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=False)


def test_a_model_without_cache_or_masks(fallbacks):
    assert_same(Bare(), 1e-12)
    assert fallbacks == [1]


class OldName(nn.Module):
    """The argument names of transformers 5.0."""

    def __init__(self):
        super().__init__()
        self.model = gpt2()
        self.config = self.model.config

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=past_key_values, use_cache=use_cache)
        return type("Output", (), dict(logits=out.logits, past_key_values=out.cache))()


def test_old_argument_name(no_fallback):
    assert accepted_arguments(OldName()) >= {"past_key_values"}
    assert_same(OldName(), 1e-12)


def test_the_base_model_of_an_adapter_is_asked():
    class Adapter(nn.Module):
        def forward(self, *args, **kwargs): ...
        def get_base_model(self):
            return gpt2()
    assert "logits_to_keep" in accepted_arguments(Adapter())


def test_the_cache_of_the_prompt_is_not_used_up():
    model = gpt2()
    ids, mask = pad_left([(5, 6), (7,)], 0)
    before = prefill(model, ids, mask)
    logprobs._score_bucket(model, before, mask, [0, 0, 1], [(7, 8), (9, 9), (8, 8)], 0)
    assert before.cache.get_seq_length() == 2 and before.cache.layers[0].keys.shape[0] == 2


@pytest.mark.parametrize("owner", [[0, 0, 1, 1], [1, 0, 1], torch.tensor([0, 1, 1]), [1]])
def test_select_rows(owner):
    cache = prefill(gpt2(), *pad_left([(5, 6), (7, 8)], 0)).cache
    keys = cache.layers[0].keys
    assert select_rows(cache, owner) is True
    assert torch.equal(cache.layers[0].keys, keys[torch.as_tensor(owner)])


def test_select_rows_leaves_other_caches_alone():
    cache = with_more_state(prefill(gpt2(), *pad_left([(5, 6), (7, 8)], 0)).cache)
    keys = cache.layers[0].keys
    assert select_rows(cache, [0, 0, 1]) is False and cache.layers[0].keys is keys


# --- pieces


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**31))
def test_gather_equals_log_softmax(rows, vocab, chunk, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, 3, vocab, generator=generator, dtype=torch.float64) * 5).requires_grad_(True)
    ids = torch.randint(0, vocab, (rows, 3), generator=generator)
    weights = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    before, logprobs.CHUNK_ELEMENTS = logprobs.CHUNK_ELEMENTS, chunk
    try:
        ours = gather_logprobs(logits, ids)
        gradient, = torch.autograd.grad((ours * weights).sum(), logits)
    finally:
        logprobs.CHUNK_ELEMENTS = before
    naive = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    expected, = torch.autograd.grad((naive * weights).sum(), logits)
    assert ours.allclose(naive, atol=1e-12, rtol=0) and gradient.allclose(expected, atol=1e-12, rtol=0)


def test_gather_does_not_hide_non_finite_logits():
    logits = torch.zeros(3, 4)
    logits[0, 1], logits[1, 2], logits[2, 0] = float("nan"), float("inf"), float("-inf")
    values = gather_logprobs(logits, torch.tensor([0, 0, 0]))
    assert not values.isfinite().any()
    assert gather_logprobs(logits[2:], torch.tensor([1])).exp().allclose(torch.tensor(1 / 3))  # a token that cannot be sampled


def test_half_precision_gradient_has_the_dtype_of_the_logits():
    logits = torch.randn(2, 5, dtype=torch.bfloat16, requires_grad=True)
    gather_logprobs(logits, torch.tensor([1, 2])).sum().backward()
    assert logits.grad.dtype == torch.bfloat16 and logits.grad.float().sum(-1).abs().max() < 1e-2


@given(st.lists(lists, max_size=5))
def test_padding_round_trip(sequences):
    for pad in (pad_left, pad_right):
        ids, mask = pad(sequences, pad_id=0)
        assert ids.shape == mask.shape and mask.dtype == torch.bool
        assert [row[kept].tolist() for row, kept in zip(ids, mask)] == sequences
    for row, kept in zip(position_ids(mask), mask):
        assert row[kept].tolist() == list(range(int(kept.sum())))


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(0, 40))
def test_length_groups(lengths, budget):
    groups = length_groups(lengths, budget)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert sum(lengths[group[0]] - lengths[index] for index in group) <= budget


@given(st.lists(st.integers(0, 4)))
def test_distinct(values):
    unique, index = distinct(values)
    assert [unique[i] for i in index] == values and len(set(unique)) == len(unique)


def test_sums_without_the_last_token():
    scored = completion_logprobs(gpt2(), PROMPTS, COMPLETIONS, OWNER)
    sums = scored.sums(score_last_token=False)
    for j, ids in enumerate(COMPLETIONS):
        assert sums[j].allclose(scored.values[j, :max(0, len(ids) - 1)].sum())
    means = scored.mean_token()
    assert means[0].allclose(scored.values[0, :4].mean()) and means[1] == 0


def test_sums_are_differentiable_for_empty_rows():
    values = torch.zeros(1, 1, requires_grad=True)
    TokenLogprobs(values * 1, torch.tensor([[False]])).sums(score_last_token=False).sum().backward()
    assert values.grad.tolist() == [[0]]


@pytest.mark.parametrize("arguments, word", [
    (([(5,)], [(7,)], []), "owner has 0 entries"), (([(5,)], [(7,)], [1]), "owner=1"), (([(5,)], [(7,)], [-1]), "owner=-1"),
    (([()], [(7,)], [0]), "has no token")])
def test_wrong_input(arguments, word):
    for score in (completion_logprobs, completion_logprobs_naive):
        with pytest.raises(ValueError, match=word):
            score(gpt2(), *arguments)


def test_inputs_are_left_alone():
    prompts, completions, owner = [[5, 6], [7]], [[8, 9], []], [1, 0]
    copies = copy.deepcopy((prompts, completions, owner))
    completion_logprobs(gpt2(), prompts, completions, owner)
    assert (prompts, completions, owner) == copies

"""What the last layer leaves out is never missed: which models it is done for, two threads at one model, models that change."""
import copy
import threading

import pytest
import torch
import transformers as tf

from comlrl_nb import last_layer
from comlrl_nb.last_layer import can_read_last_only, exchanged_attention, last_position_only
from comlrl_nb.logprobs import completion_logprobs, completion_logprobs_naive
from comlrl_nb.models.last_states import last_states
from comlrl_nb.toy import micro_model
from test_architectures import CONFIGS, LLAMA

NARROWED = {"llama", "qwen2", "phi3", "gpt2", "opt", "gpt_neox", "mistral with a window", "gemma3 with windows", "deepseek_v3", "jetmoe", "lfm2"}
MORE = {"a convolution last": (lambda: tf.Lfm2Config(**LLAMA, layer_types=["full_attention", "conv"]), False),
        "experts": (lambda: tf.Qwen3MoeConfig(**LLAMA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=8), True),
        "mixtral": (lambda: tf.MixtralConfig(**LLAMA, num_local_experts=4), True)}
TEXTS = [tuple(range(3, 40)), tuple(range(5, 21)), (7, 8, 9)]


def built(config):
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", CONFIGS)
def test_which_models_compute_less(kind):
    assert can_read_last_only(built(CONFIGS[kind]())) == (kind in NARROWED)


@pytest.mark.parametrize("kind", MORE)
def test_what_comes_after_attention_decides(kind):
    config, less = MORE[kind]
    model = built(config())
    assert can_read_last_only(model) == less
    found, wanted = last_states(model, TEXTS), torch.stack([model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0, -1] for text in TEXTS])
    assert (found - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("change", ["checkpointing", "adapter", "eager", "forward", "training", "compiled"])
def test_models_that_are_changed_afterwards(change):
    """Values and gradients stay those of whole sequences, whatever was found out before."""
    model = micro_model(0, dtype=torch.float64)
    assert can_read_last_only(model)
    if change == "checkpointing":
        model.gradient_checkpointing_enable()
    elif change == "adapter":
        model.model.layers[-1].mlp.down_proj = Adapted(model.model.layers[-1].mlp.down_proj)
    elif change == "eager":
        model.set_attn_implementation("eager")
    elif change == "forward":
        plain = model.model.layers[-1].mlp.forward
        model.model.layers[-1].mlp.forward = lambda states: 2 * plain(states) - states.mean(1, keepdim=True)
    elif change == "compiled":
        model.compile(backend="eager")
    model.train(change in ("checkpointing", "training"))
    assert not can_read_last_only(model)
    prompts, completions, owner = TEXTS, [(4, 5), (6,), (7, 8, 9)], [0, 1, 2]
    found, wanted = (score(model, prompts, completions, owner).sums() for score in (completion_logprobs, completion_logprobs_naive))
    if change != "forward":
        assert (found - wanted).abs().max() < 1e-6
        gradients = [torch.autograd.grad(sums.sum(), list(model.parameters()), allow_unused=True) for sums in (found, wanted)]
        assert all((a is None) == (b is None) and (a is None or (a - b).abs().max() < 1e-6) for a, b in zip(*gradients))


class Adapted(torch.nn.Module):
    """A part of somebody's own around a part of the library."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, states):
        return self.inner(states) + 0.1


def test_two_threads_read_one_model():
    """Each leaves out what it need not compute, and is not disturbed by the other's hooks, or by one that wants everything."""
    model, wrong, start = micro_model(0), [], threading.Barrier(3)
    states = [last_states(model, [text]).detach() for text in TEXTS]
    whole = model(torch.tensor([TEXTS[0]])).logits.detach()

    def read(place):
        start.wait()
        for _ in range(60):
            if not torch.equal(last_states(model, [TEXTS[place]]), states[place]):
                wrong.append(place)

    def read_all():
        start.wait()
        for _ in range(60):
            if not torch.allclose(model(torch.tensor([TEXTS[0]])).logits, whole, atol=1e-5):
                wrong.append("all")

    threads = [threading.Thread(target=read, args=(place,)) for place in (0, 1)] + [threading.Thread(target=read_all)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules()) and model.config._attn_implementation == "sdpa"


def test_nothing_is_left_behind_when_the_model_raises():
    model = micro_model(0)
    with pytest.raises(IndexError), last_position_only(model):
        model(torch.tensor([[10**6]]))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules()) and model.config._attn_implementation == "sdpa"
    assert last_layer._going_on.get() is None and not last_layer._users


def test_a_copy_made_inside_is_an_ordinary_model():
    model = micro_model(0)
    with last_position_only(model), exchanged_attention(model):
        twin = copy.deepcopy(model)
    ids = torch.tensor([[4, 5, 6]])
    assert torch.allclose(twin(ids).logits, model(ids).logits, atol=1e-6)

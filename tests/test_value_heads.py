"""Value heads and models that carry them: which token is read, saving and reading back, tied embeddings; which critics are loaded from what."""
import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from comlrl_nb.models.actor_critic import HEAD_FILE, ActorCriticOutput, CausalLMWithValueHead, ValueHead, text_values, with_value_head
from comlrl_nb.toy import micro_model
from actor_critic_runs import TOKENIZER, all_optimizers, config, critic, everything, forwards, letters, louder, make, rows, same, team, trained, weights
from comlrl_nb.trainers.actor_critic import IACTrainer, MAACTrainer

TEXTS = [(1, 30, 31), (1, 32, 33, 34, 35, 36, 37, 2, 38), (1,), (1, 2, 2), (1, 0, 40), (1, 30, 31)]  # end and padding ids inside


def headed(kind="gpt2", dtype=torch.float64, hidden=None, seed=0):
    torch.manual_seed(seed)
    model = CausalLMWithValueHead(micro_model(seed, kind, dtype), hidden).eval()
    with torch.no_grad():
        model.value_head.out.weight.mul_(30)
    return model


@torch.no_grad()
def alone(model, ids):
    """The value after the last token of one text, by the plain forward of the whole model."""
    return model(torch.tensor([ids])).values[0, -1].item()


# the head

def test_a_linear_head_by_hand():
    head = ValueHead(3)
    with torch.no_grad():
        head.out.weight.copy_(torch.tensor([[1.0, 2.0, -1.0]])), head.out.bias.fill_(0.5)
    assert head(torch.tensor([[1.0, 1.0, 1.0], [2.0, 0.0, 4.0]])).tolist() == [[2.5], [-1.5]] and [*head.state_dict()] == ["out.weight", "out.bias"]


def test_a_hidden_layer_by_hand():
    head = ValueHead(2, 3)
    assert {name: tuple(value.shape) for name, value in head.state_dict().items()} == {"hidden.weight": (3, 2), "hidden.bias": (3,), "out.weight": (1, 3), "out.bias": (1,)}
    states = torch.randn(4, 5, 2)
    wanted = torch.tanh(states @ head.hidden.weight.T + head.hidden.bias) @ head.out.weight.T + head.out.bias
    torch.testing.assert_close(head(states), wanted)
    assert head(states).shape == (4, 5, 1)


def test_new_heads_are_near_zero_and_drawn_from_the_global_stream():
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(weights([ValueHead(16, 4)]))
    assert same(found[0], found[1]) and not same(found[0], found[2])
    assert found[0][0]["out.weight"].abs().max() < 0.2 and not found[0][0]["out.bias"].any()


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "8"])
def test_a_wrong_hidden_size(size):
    with pytest.raises(ValueError, match=r"hidden_dim=.*positive integer"):
        ValueHead(4, size)


def test_a_model_without_a_width_is_refused():
    with pytest.raises(ValueError, match="base_model.*hidden_size.*Linear"):
        CausalLMWithValueHead(nn.Linear(2, 2))


# one forward

@pytest.mark.parametrize("hidden", [None, 4])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_forward_gives_logits_and_a_value_per_token(kind, hidden):
    model, ids = headed(kind, hidden=hidden), torch.tensor([[1, 30, 31, 32]])
    out, plain = model(ids), model.model(ids, output_hidden_states=True)
    assert isinstance(out, ActorCriticOutput) and torch.equal(out.logits, plain.logits)
    torch.testing.assert_close(out.values, model.value_head(plain.hidden_states[-1])[..., 0], rtol=0, atol=0)
    assert out.values.shape == (1, 4) and model.config is model.model.config


def test_a_value_knows_only_what_stands_before_it():
    """C40: the value at a place is that of the text up to there; later tokens change nothing."""
    model = headed()
    long = model(torch.tensor([TEXTS[1]])).values[0]
    for end in range(1, len(TEXTS[1]) + 1):
        assert long[end - 1].item() == pytest.approx(alone(model, TEXTS[1][:end]), rel=1e-12)


@pytest.mark.parametrize("wanted", [True, False])
def test_hidden_states_on_request(wanted):
    for model in (headed(), CausalLMWithValueHead(micro_model(), attach_value_head=False)):
        out = model(torch.tensor([[1, 30]]), output_hidden_states=wanted)
        assert (out.hidden_states is not None) == (wanted or model.value_head is not None)


def test_values_can_be_left_out():
    model, ids = headed(), torch.tensor([[1, 30, 31]])
    assert model(ids, output_values=False).values is None and model(ids, output_values=False).hidden_states is None
    bare = CausalLMWithValueHead(micro_model(), attach_value_head=False)
    assert bare.value_head is None and bare(ids).values is None
    cached = model(ids, use_cache=True).past_key_values
    torch.testing.assert_close(model(torch.tensor([[32]]), past_key_values=cached).values[0, -1], model(torch.tensor([[1, 30, 31, 32]])).values[0, -1])


def test_generate_is_the_language_models_own():
    model = headed(dtype=torch.float32)
    seen = []
    model.model.generate = lambda *args, **more: seen.append((args, more)) or "written"
    assert model.generate(1, top_k=2) == "written" and seen == [((1,), {"top_k": 2})]


def test_the_head_follows_the_models_type():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = headed(dtype=dtype)
        assert model.value_head.out.weight.dtype == dtype
        values = text_values(model, TEXTS)
        assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and torch.isfinite(values).all()


# which token is read

@pytest.mark.parametrize("hidden", [None, 4])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_values_of_many_texts_are_those_of_each_alone(kind, hidden):
    model = headed(kind, hidden=hidden)
    found = text_values(model, TEXTS).tolist()
    assert found == pytest.approx([alone(model, ids) for ids in TEXTS], rel=1e-6 if kind == "llama" else 1e-10)
    assert len({round(value, 9) for value in found}) == 5 and found[0] == pytest.approx(found[5], rel=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_score_token_comes_from_the_mask_not_from_padding_ids(kind, side):
    """C43: whatever the id of the padding and whatever ends a text, the value is read at the last attended token."""
    model = headed(kind)
    for pad in (0, 2, 38, 77):
        assert text_values(model, TEXTS, pad).tolist() == text_values(model, TEXTS, 0).tolist()
    width = 12
    for ids in TEXTS:
        gap = width - len(ids)
        row = [2] * gap + [*ids] if side == "left" else [*ids] + [2] * gap
        mask = torch.tensor([[0] * gap + [1] * len(ids) if side == "left" else [1] * len(ids) + [0] * gap])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        values = model(torch.tensor([row]), attention_mask=mask, position_ids=positions).values[0]
        assert values[-1 if side == "left" else len(ids) - 1].item() == pytest.approx(alone(model, ids), rel=1e-6)


def test_other_texts_of_the_batch_change_nothing():
    model = headed()
    assert text_values(model, TEXTS[:1]).item() == pytest.approx(text_values(model, TEXTS * 3)[0].item(), rel=1e-12)
    assert text_values(model, []).shape == (0,)


def test_each_distinct_text_runs_once():
    model = headed()
    calls = forwards(model.model)
    text_values(model, TEXTS * 4)
    assert sum(map(len, calls)) == 5


def test_the_gradient_is_that_of_the_whole_model():
    model = headed()
    twin = copy.deepcopy(model)
    weigh = torch.arange(1.0, 7.0, dtype=torch.float64)
    (text_values(model, TEXTS) * weigh).sum().backward()
    sum(w * twin(torch.tensor([ids])).values[0, -1] for w, ids in zip(weigh, TEXTS)).backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        torch.testing.assert_close(p.grad, q.grad if q.grad is not None else None, rtol=1e-9, atol=1e-12, msg=name)


def test_the_output_layer_of_a_critic_is_not_computed():
    model, seen = headed(), []
    model.model.get_output_embeddings().register_forward_hook(lambda *args: seen.append(1))
    text_values(model, TEXTS)
    assert seen == []


def test_a_model_wrapped_by_something_else_is_read_through_its_forward():
    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.config = inner, inner.config

        def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None, output_hidden_states=None):
            return self.inner(input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache, output_hidden_states=output_hidden_states)

    model = headed()
    other = CausalLMWithValueHead(Wrapped(model.model), attach_value_head=True)
    other.value_head = model.value_head
    assert text_values(other, TEXTS).tolist() == pytest.approx(text_values(model, TEXTS).tolist(), rel=1e-12)


def test_texts_that_cannot_be_judged():
    with pytest.raises(ValueError, match="without tokens"):
        text_values(headed(), [(1, 2), ()])
    with pytest.raises(ValueError, match="no value head.*attach_value_head=True"):
        text_values(CausalLMWithValueHead(micro_model(), attach_value_head=False), [(1,)])


# saving and reading back

@pytest.mark.parametrize("hidden", [None, 6])
@pytest.mark.parametrize("kind, dtype", [("gpt2", torch.float32), ("llama", torch.float32), ("gpt2", torch.float64), ("gpt2", torch.bfloat16)])  # a converted llama rotates in bfloat16, a loaded one does not
def test_c42_heads_are_read_back_bit_for_bit(tmp_path, kind, hidden, dtype):  # C42
    model = headed(kind, dtype, hidden, seed=3)
    model.save_pretrained(tmp_path)
    torch.manual_seed(99)
    back = CausalLMWithValueHead.from_pretrained(tmp_path, dtype=dtype)
    assert same(weights([model]), weights([back])) and torch.equal(text_values(model, TEXTS), text_values(back, TEXTS))
    assert back.value_head.out.weight.dtype == dtype and (back.value_head.hidden is None) == (hidden is None)


@pytest.mark.slow
def test_c42_another_process_reads_the_same_values(tmp_path):
    model = headed("llama", torch.float32, 5, seed=3)
    model.save_pretrained(tmp_path)
    code = f"from comlrl_nb.models import CausalLMWithValueHead as M\nfrom comlrl_nb.models.actor_critic import text_values\nprint(text_values(M.from_pretrained({str(tmp_path)!r}), {TEXTS!r}).tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert eval(done.stdout) == text_values(model, TEXTS).tolist(), done.stderr


def test_a_plain_folder_for_everybody_else(tmp_path):
    """The language model is an ordinary folder: transformers reads it."""
    from transformers import AutoModelForCausalLM
    model = headed(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert same(weights([AutoModelForCausalLM.from_pretrained(tmp_path)]), weights([model.model])) and (tmp_path / HEAD_FILE).exists()


def test_c42_a_folder_without_a_head_warns(tmp_path):
    micro_model().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=f"{HEAD_FILE}.*untrained"):
        model = CausalLMWithValueHead.from_pretrained(str(tmp_path), 4)
    assert model.value_head.hidden.out_features == 4
    bare = CausalLMWithValueHead.from_pretrained(tmp_path, attach_value_head=False)
    assert bare.value_head is None


def test_a_head_can_be_left_behind(tmp_path, recwarn):
    headed(dtype=torch.float32).save_pretrained(tmp_path)
    assert CausalLMWithValueHead.from_pretrained(tmp_path, attach_value_head=False).value_head is None and not [w for w in recwarn if "untrained" in str(w.message)]


def test_a_model_without_a_head_leaves_no_old_head_behind(tmp_path):
    headed(dtype=torch.float32).save_pretrained(tmp_path)
    CausalLMWithValueHead(micro_model(1), attach_value_head=False).save_pretrained(tmp_path)
    assert not (tmp_path / HEAD_FILE).exists()


@pytest.mark.parametrize("saved, asked", [(6, 5), (None, 4)])
def test_another_hidden_size_than_saved_is_refused(tmp_path, saved, asked):
    headed(dtype=torch.float32, hidden=saved).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"value_head_hidden_dim={asked}.*has {saved}"):
        CausalLMWithValueHead.from_pretrained(tmp_path, asked)


@pytest.mark.parametrize("kind, tied", [("gpt2", True), ("llama", True), ("llama", False)])
def test_c49_tied_embeddings_stay_tied(tmp_path, kind, tied):
    model = CausalLMWithValueHead(micro_model(0, kind, tie_word_embeddings=tied), 3)
    model.save_pretrained(tmp_path)
    back = CausalLMWithValueHead.from_pretrained(tmp_path)
    for each in (model, back):
        assert (each.model.get_output_embeddings().weight is each.model.get_input_embeddings().weight) == tied
    assert same(weights([model]), weights([back]))


def test_with_value_head(tmp_path):
    saved = headed(dtype=torch.float32, hidden=3)
    saved.save_pretrained(tmp_path)
    model = micro_model(5)
    assert with_value_head(saved) is saved
    assert with_value_head(model, hidden_dim=4).value_head.hidden.out_features == 4 and with_value_head(model, "no/such/folder").value_head.hidden is None
    again = with_value_head(model, str(tmp_path))
    assert again.model is model and same(weights([again.value_head]), weights([saved.value_head]))


# trainers save and read back

WAYS = {"MAAC": dict(name="MAAC"), "MAAC, hidden": dict(name="MAAC", model_config={"critic_value_head_hidden_dim": 5}), "IAC": dict(name="IAC", critic_value_head_hidden_dim=5),
        "heads": dict(name="IAC", use_separate_critic=False), "heads, hidden": dict(name="IAC", use_separate_critic=False, value_head_hidden_dim=5)}


def again(folder, *, name="MAAC", use_separate_critic=True, **fields):
    """A trainer made of what the folder holds; the head sizes are in the files."""
    given = {} if not use_separate_critic else dict(critic_model=f"{folder}/critic") if name == "MAAC" else dict(critics=[f"{folder}/agent_{i}/critic" for i in (0, 1)])
    trainer = MAACTrainer if name == "MAAC" else IACTrainer
    args = config(name) if use_separate_critic else config(name, use_separate_critic=False)
    return trainer(agents=[f"{folder}/agent_0", f"{folder}/agent_1"], args=args, reward_func=letters, train_dataset=rows(), callbacks=[], **given)


@pytest.mark.parametrize("way", WAYS)
def test_c42_trainers_save_what_trainers_read(way, tmp_path):
    more = WAYS[way]
    trainer = louder(trained(**more, num_train_epochs=1))
    trainer.save_model(tmp_path)
    back = again(tmp_path, **more)
    assert same(everything(trainer), everything(back)) and back.model_name == f"{tmp_path}/agent_0"
    where = ["critic"] if trainer.critics and way.startswith("MAAC") else ["agent_0/critic", "agent_1/critic"] if trainer.critics else ["agent_0", "agent_1"]
    owners = trainer.critics or trainer.agents
    for folder, owner in zip(where, owners, strict=True):
        assert same(weights([CausalLMWithValueHead.from_pretrained(tmp_path / folder)]), weights([owner]))
    assert sorted(str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob(HEAD_FILE)) == where


def test_agents_saved_with_heads_serve_trainers_without(tmp_path):
    trainer = trained(name="IAC", use_separate_critic=False)
    trainer.save_model(tmp_path)
    back = MAACTrainer(agents=[f"{tmp_path}/agent_0", f"{tmp_path}/agent_1"], critic_model=f"{tmp_path}/agent_0", args=config(), reward_func=letters, train_dataset=rows(), callbacks=[])
    assert same(weights([model.model for model in trainer.agents]), weights([model.model for model in back.agents])) and all(model.value_head is None for model in back.agents)
    assert same(weights([back.critics[0]]), weights([trainer.agents[0]]))  # a critic that starts as agent 0 with its head
    back.train()


@pytest.mark.parametrize("kind, tied", [("gpt2", True), ("llama", True)])
def test_c49_tied_critics_are_trained_as_one_parameter(kind, tied, tmp_path):
    for more in (dict(name="MAAC"), dict(name="IAC", use_separate_critic=False)):
        agents = [micro_model(i, kind, tie_word_embeddings=tied) for i in (0, 1)]
        given = dict(critics=[micro_model(9, kind, tie_word_embeddings=tied)]) if more["name"] == "MAAC" else {}
        trainer = make(agents, **more, **given)
        for optimizer in all_optimizers(trainer):
            owned = [p for group in optimizer.param_groups for p in group["params"]]
            assert len(owned) == len(set(owned))
        trainer.train(), trainer.save_model(tmp_path / more["name"])
        back = again(tmp_path / more["name"], **more)
        assert same(everything(trainer), everything(back))
        for model in [*back.agents, *back.critics]:
            assert model.model.get_output_embeddings().weight is model.model.get_input_embeddings().weight


def test_the_tokenizer_is_saved_with_each_agent(tmp_path):
    trainer = make()
    trainer.save_model(tmp_path)
    from transformers import AutoTokenizer
    for i in (0, 1):
        assert AutoTokenizer.from_pretrained(tmp_path / f"agent_{i}")("say ab")["input_ids"] == TOKENIZER("say ab")["input_ids"]

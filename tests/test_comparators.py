"""Who the agents are compared with: every source on one item, whose weights write in which round, random streams, tokenizers, texts for all roles, answers that are missing."""
import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from comlrl_nb.comparators import in_tokens_of
from comlrl_nb.config_preference import COMPARATOR_POLICIES
from comlrl_nb.toy import data_dir, load_tokenizer, micro_model, micro_tokenizer
from comlrl_nb.types import Completion
from comlrl_nb.writers import Actor
from iterative_runs import (TOKENIZER, Halves, asked, assert_same_run, entering_weights, files, in_ids, iter_rows, joints, letters, make, rows, same, scripted, stored, team,
                            trained, weights, writers_weights)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model with its tokenizer in a folder."""
    path = tmp_path_factory.mktemp("model")
    micro_model(41, "gpt2", n_layer=1).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return str(path)


def source_of(policy, saved):
    return {"current": {}, "current_copy": dict(comparator_devices="cpu:1"), "model": dict(comparator_model_name=saved), "history": {},
            "api": dict(comparator_api_url="http://127.0.0.1:9/none")}[policy]


LOCAL = [policy for policy in COMPARATOR_POLICIES if policy != "api"]
NAMES = [(policy, name) for policy, aliases in COMPARATOR_POLICIES.items() for name in (policy, policy.upper(), *aliases)]


# every source on one item

@pytest.mark.parametrize("policy, name", NAMES)
def test_every_name_of_a_policy_is_understood(policy, name, saved):
    if policy == "api":
        pytest.importorskip("httpx"), pytest.importorskip("tenacity")
    trainer = make(comparator_policy=name, train_dataset=rows(1), **source_of(policy, saved))
    kinds = {"current": "Current", "current_copy": "CurrentCopy", "model": "Fixed", "history": "Past", "api": "Remote"}
    assert trainer.args.comparator_policy == policy and type(trainer.rounds.comparator.source).__name__ == kinds[policy]
    assert (trainer.rounds.past is not None) == (policy == "history")


@pytest.mark.parametrize("policy", LOCAL)
def test_every_local_policy_compares_one_item(policy, saved):
    trainer = make(comparator_policy=policy, train_dataset=rows(1), preference_pairs_per_sample=None, pair_selection="all", num_iterations=1, **source_of(policy, saved))
    seen = writers_weights(trainer)
    before = weights(trainer)
    trainer.train()
    row, = iter_rows(trainer)
    assert row["pairs"] + row["tied_pairs"] + row["identical_pairs"] == 4 and row["pairs"] > 0 and row["unanswered"] == row["unsplit"] == 0
    fixed = weights([micro_model(41, "gpt2", n_layer=1)]) * 2
    assert same(seen[0], fixed if policy == "model" else before)


def policy_samples(trainer):
    """What training samples next."""
    return trainer.team.sample([[row["prompt"]] * 2 for row in rows()], 4, "policy")


@pytest.mark.parametrize("policy", LOCAL)
def test_comparing_never_changes_what_the_policy_samples_next(policy, saved):
    def after(comparator_candidates):
        trainer = make(comparator_policy=policy, comparator_num_candidates=comparator_candidates, **source_of(policy, saved))
        if trainer.rounds.past is not None:
            trainer.rounds.past.enter(1)
        torch.manual_seed(7)
        first = policy_samples(trainer)
        with asked(trainer) as answers:
            answers(comparator_candidates)
        second = policy_samples(trainer)
        return first, second, torch.rand(3).tolist()

    plain = make()
    torch.manual_seed(7)
    alone = policy_samples(plain), policy_samples(plain), torch.rand(3).tolist()
    assert after(1) == after(5) == alone


@pytest.mark.parametrize("policy", ["current", "current_copy", "history"])
def test_the_current_weights_write_something_else_than_the_policy(policy):
    """The same weights, but random streams of their own: not the candidates of the agents over again."""
    trainer = make(comparator_policy=policy, num_iterations=1)
    trainer.train()
    assert all(pair["winner_completions"] != pair["loser_completions"] for pair in stored(trainer)[0]["pairs"])
    trainer = make(comparator_policy="current")
    found = joints(trainer)
    for own, theirs in zip(policy_samples(make()), found):
        assert list(zip(*(generation.completions for generation in own))) != theirs


def test_the_current_weights_are_neither_copied_nor_moved():
    trainer = make(comparator_policy="current", comparator_devices="cpu:1")
    with asked(trainer):
        assert all(a is b for a, b in zip(trainer.rounds.comparator.source.open.models, trainer.agents))
    assert trainer.rounds.comparator.source.open is None


def test_it_writes_nothing_outside_a_round():
    trainer = make()
    with pytest.raises(AttributeError):
        trainer.rounds.comparator.source.write([["a", "b"]], 1, [{}])


# copies

class Wrapped(nn.Module):
    """A model around a model, which no configuration describes."""

    def __init__(self, inner, extra):
        super().__init__()
        self.inner, self.shift = inner, nn.Parameter(torch.full((1,), extra))
        self.config, self.generation_config, self.dtype = inner.config, inner.generation_config, inner.dtype

    def forward(self, input_ids, **keywords):
        out = self.inner(input_ids=input_ids, **keywords)
        out.logits = out.logits + self.shift * torch.arange(out.logits.shape[-1]).remainder(7)
        return out

    def generate(self, input_ids, attention_mask, num_return_sequences, max_new_tokens, **keywords):
        ids, mask = (each.repeat_interleave(num_return_sequences, 0) for each in (input_ids, attention_mask))
        for _ in range(max_new_tokens):
            logits = self(ids, attention_mask=mask, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        return ids

    def get_input_embeddings(self):
        return self.inner.get_input_embeddings()

    def get_output_embeddings(self):
        return self.inner.get_output_embeddings()


def wrapped_team():
    return [Wrapped(model, 0.1 * (i + 1)) for i, model in enumerate(team(("gpt2", "gpt2")))]


def lora_team():
    """Adapters that train on frozen models."""
    peft = pytest.importorskip("peft")
    places = (["c_attn"], ["q_proj", "v_proj"])
    return [peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=names, fan_in_fan_out=names == ["c_attn"], task_type="CAUSAL_LM")) for model, names in zip(team(("gpt2", "llama")), places)]


@pytest.mark.parametrize("policy", ["current", "current_copy", "history"])
def test_adapters_train_and_what_they_stand_on_stays(policy):
    agents = lora_team()
    before = {name: value.clone() for index, model in enumerate(agents) for name, value in model.state_dict(prefix=f"{index} ").items()}
    trained(agents=agents, comparator_policy=policy, num_iterations=2, policy_checkpoint_dir="kept", **(dict(comparator_devices="cpu:1") if policy == "current_copy" else {}))
    after = {name: value for index, model in enumerate(agents) for name, value in model.state_dict(prefix=f"{index} ").items()}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all("lora_" in name for name in moved) and {name[0] for name in moved} == {"0", "1"}
    assert sorted(path.name for path in Path("kept/iteration_0002/agent_1").iterdir() if path.name.startswith("adapter")) == ["adapter_config.json", "adapter_model.safetensors"]


def test_what_a_killed_process_was_writing_goes():
    trainer = make(policy_checkpoint_dir="kept", num_iterations=1)
    left = Path("kept/iteration_0001/.agent_1.4711.tmp")
    left.mkdir(parents=True)
    (left.parent / "run").write_text(trainer.rounds.store.index.run)
    (left / "half.safetensors").touch()
    trainer.train()
    assert sorted(path.name for path in left.parent.iterdir()) == ["agent_0", "agent_1", "run"]


def test_a_model_that_cannot_be_saved_is_not_kept():
    with pytest.raises(ValueError, match="policy_checkpoint_dir: agent 0 .Wrapped. has no save_pretrained"):
        make(agents=wrapped_team(), policy_checkpoint_dir="kept")


@pytest.mark.parametrize("policy", ["current_copy", "history"])
@pytest.mark.parametrize("agents", [lambda: team(("gpt2", "llama")), wrapped_team, lora_team])
def test_copies_on_another_device_are_made_from_the_weights_alone(policy, agents, monkeypatch):
    trainer = make(agents=agents(), comparator_policy=policy, comparator_devices="cpu:1")

    def refuse(*args, **kwargs):
        raise AssertionError("a model was built again")

    for owner, name in ((AutoModelForCausalLM, "from_config"), (AutoModelForCausalLM, "from_pretrained"), (PreTrainedModel, "from_pretrained"), (PreTrainedModel, "__init__")):
        monkeypatch.setattr(owner, name, refuse)
    trainable = [p.requires_grad for model in trainer.agents for p in model.parameters()]
    if trainer.rounds.past is not None:
        trainer.rounds.past.enter(1)
    with asked(trainer) as answers:
        copies = trainer.rounds.comparator.source.open.models
        assert same(weights(copies), weights(trainer)) and not any(a is b for a, b in zip(copies, trainer.agents))
        assert all(not p.requires_grad and p.grad is None for model in copies for p in model.parameters())
        assert not {p.data_ptr() for model in copies for p in model.parameters()} & {p.data_ptr() for model in trainer.agents for p in model.parameters()}
        assert answers(2)[0].joints
    assert [p.requires_grad for model in trainer.agents for p in model.parameters()] == trainable


def test_a_copy_follows_training_and_is_forgotten_after_its_round():
    trainer = make(comparator_policy="current_copy", comparator_devices="cpu:1", num_iterations=3)
    seen, entered, alive, source = writers_weights(trainer), entering_weights(trainer), [], trainer.rounds.comparator.source
    real = source.writers
    source.writers = lambda iteration: alive.append(weakref.WeakSet((found := real(iteration)).models)) or found
    trainer.train()
    assert len(seen) == 3 and all(map(same, seen, entered)) and not same(seen[0], seen[1])
    gc.collect()
    assert [len(each) for each in alive] == [0, 0, 0]


def test_a_run_with_a_copy_is_the_run_with_the_weights_themselves():
    assert_same_run(trained(comparator_policy="current"), trained(comparator_policy="current_copy", comparator_devices=["cpu:1", "cpu:2"]))


def test_on_the_same_device_nothing_is_copied():
    trainer = make(comparator_policy="current_copy")
    with asked(trainer):
        assert all(a is b for a, b in zip(trainer.rounds.comparator.source.open.models, trainer.agents))


# history

@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("folder", [None, "kept"])
def test_history_is_the_policy_that_entered_k_rounds_before(k, folder):
    trainer = make(comparator_policy="history", comparator_history_k=k, num_iterations=5, policy_checkpoint_dir=folder, train_dataset=rows(2), preference_num_candidates=3)
    seen, entered, kept = writers_weights(trainer), entering_weights(trainer), []
    real, place = trainer.rounds.comparator.source.writers, Path(folder or trainer.folder / "policies")
    trainer.rounds.comparator.source.writers = lambda iteration: kept.append([int(path.name[-4:]) for path in sorted(place.iterdir())]) or real(iteration)
    trainer.train()
    assert len(entered) == 5 and all(not same(a, b) for a, b in zip(entered, entered[1:]))
    for iteration in range(1, 6):
        assert same(seen[iteration - 1], entered[max(1, iteration - k) - 1])
        assert kept[iteration - 1] == list(range(1 if folder else max(1, iteration - k), iteration + 1))
    assert sorted(path.name for path in (place / "iteration_0005").iterdir()) == [*(["agent_0"] if folder else []), "agent_0.pt", *(["agent_1"] if folder else []), "agent_1.pt", "run"]
    weights = sorted(int(path.parent.name[-4:]) for path in place.glob("iteration_*/agent_0.pt"))
    assert weights == list(range(max(1, 5 - k), 6))
    assert same([torch.load(place / f"iteration_0005/agent_{i}.pt", weights_only=True) for i in range(2)], entered[4])


@pytest.mark.parametrize("policy", ["current", "model"])
def test_a_checkpoint_folder_keeps_the_policies_whoever_is_compared_with(policy, saved):
    trainer = make(comparator_policy=policy, policy_checkpoint_dir="kept", num_iterations=2, **source_of(policy, saved))
    entered = entering_weights(trainer)
    trainer.train()
    assert [path.name for path in sorted(Path("kept").iterdir())] == ["iteration_0001", "iteration_0002"]
    for number, own in enumerate(entered, 1):
        assert sorted(path.name for path in Path(f"kept/iteration_000{number}").iterdir()) == ["agent_0", "agent_1", "run"]
        assert same([AutoModelForCausalLM.from_pretrained(f"kept/iteration_000{number}/agent_{i}").state_dict() for i in range(2)], own)


def test_kept_policies_can_be_compared_with_later():
    trainer = trained(comparator_policy="history", policy_checkpoint_dir="kept", num_iterations=2)
    again = make(comparator_policy="model", comparator_agents=[f"kept/iteration_0002/agent_{i}" for i in range(2)])
    assert wrote(again, [AutoModelForCausalLM.from_pretrained(f"kept/iteration_0002/agent_{i}") for i in range(2)]) and trainer


def test_kept_policies_of_another_run_are_left_alone():
    trained(policy_checkpoint_dir="kept", num_iterations=1)
    with pytest.raises(FileExistsError, match="policy_checkpoint_dir"):
        make(policy_checkpoint_dir="kept", num_iterations=1, agents=team(("llama", "llama"))).train()


def test_history_with_one_object_for_two_agents():
    one, = team(("gpt2",))
    trainer = make(agents=[one, one], comparator_policy="history", num_iterations=3)
    seen, entered = writers_weights(trainer), entering_weights(trainer)
    trainer.train()
    assert same(seen[2], entered[1]) and not same(seen[2], entered[2])


def test_history_on_another_device_is_the_same_run():
    assert_same_run(trained(comparator_policy="history"), trained(comparator_policy="history", comparator_devices="cpu:1"))


def test_weights_that_somebody_deleted_are_missed_by_name():
    trainer = make(comparator_policy="history", num_iterations=2)
    trainer.rounds.past.enter(1)
    (trainer.folder / "policies/iteration_0001/agent_1.pt").unlink()
    with pytest.raises(FileNotFoundError, match="agent_1.pt.*round 1.*history"):
        joints(trainer, iteration=2)


# models

def wrote(trainer, models):
    """True when the comparator's places are these weights in this order."""
    with asked(trainer):
        return same(weights(trainer.rounds.comparator.source.open.models), weights(models))


def test_a_model_by_name_is_loaded_once_and_frozen(saved):
    trainer = make(comparator_policy="model", comparator_model_name=saved)
    first, second = trainer.rounds.comparator.source.fixed.models
    assert first is second and wrote(trainer, [micro_model(41, "gpt2", n_layer=1)] * 2) and not any(p.requires_grad for p in first.parameters())
    assert all(each.joints and None not in each.joints for each in _answers(trainer))
    trainer.train()
    assert wrote(trainer, [micro_model(41, "gpt2", n_layer=1)] * 2)


def _answers(trainer, num=2):
    with asked(trainer) as answers:
        return answers(num)


def test_models_by_name_one_per_agent(saved, tmp_path):
    other = tmp_path / "other"
    micro_model(42, "llama").save_pretrained(other), TOKENIZER.save_pretrained(other)
    trainer = make(comparator_policy="model", comparator_agents=[str(other), saved])
    assert wrote(trainer, [micro_model(42, "llama"), micro_model(41, "gpt2", n_layer=1)]) and _answers(trainer)[0].joints[0]


@pytest.mark.parametrize("shared", [False, True])
def test_model_objects_read_with_the_actors_tokenizers(shared):
    given = [micro_model(43, "gpt2", n_layer=1), micro_model(44, "llama")]
    given = [given[0]] * 2 if shared else given
    trainer = make(comparator_policy="model", comparator_agents=given)
    before = weights(given)
    assert wrote(trainer, given) and [actor.tokenizer for actor in trainer.rounds.comparator.source.fixed.actors] == [TOKENIZER] * 2
    trainer.train()
    assert same(weights(given), before)


def test_one_object_on_two_devices_runs_as_on_one():
    def run(**where):
        return trained(comparator_policy="model", comparator_agents=[micro_model(43, "gpt2", n_layer=1)] * 2, **where)

    assert_same_run(run(), run(comparator_devices=["cpu:1", "cpu:2"]))


def test_the_trained_agent_as_its_own_comparator_is_a_snapshot():
    """A comparator model never changes, and nobody moves an agent to the comparator's device."""
    agents = team(("gpt2", "gpt2"))
    trainer = make(agents=agents, comparator_policy="model", comparator_agents=agents, comparator_devices="cpu:1", num_iterations=3)
    seen, initial = writers_weights(trainer), weights(agents)
    trainer.train()
    assert all(same(each, initial) for each in seen) and not same(weights(trainer), initial)
    assert all(p.requires_grad and p.device == torch.device("cpu") for model in trainer.agents for p in model.parameters())


def test_texts_of_another_tokenizer_are_encoded_as_the_actors_would_have_written_them():
    trainer = make(comparator_policy="model", comparator_model_name=str(data_dir()), max_new_tokens=12)
    words = load_tokenizer()
    assert words.get_vocab() != TOKENIZER.get_vocab()
    finished = set()
    for each in _answers(trainer, 8):
        for joint in each.joints:
            for part in joint:
                assert part == in_ids(part.text, (2,) if part.finished else ()) and part.text
                finished.add(part.finished)
    assert True in finished
    trainer.train()
    for pair in stored(trainer)[0]["pairs"]:
        side = "winner" if pair["target_raw_reward"] == pair["loser_reward"] else "loser"
        for text, ids, done in zip(pair[f"{side}_completions"], pair[f"{side}_tokens"]["ids"], pair[f"{side}_tokens"]["finished"]):
            assert tuple(ids) == in_ids(text, (2,) if done else ()).token_ids


def test_an_equal_tokenizer_keeps_the_sampled_ids():
    actor, completion = Actor(micro_model(), TOKENIZER, torch.device("cpu"), (2,)), Completion("ab", (67, 68, 2), True)
    assert in_ids("ab").token_ids != (67, 68, 2)
    assert in_tokens_of(actor, completion, micro_tokenizer()) == in_tokens_of(actor, completion, TOKENIZER) == completion
    assert in_tokens_of(actor, completion, None) == in_ids("ab")
    assert in_tokens_of(actor, Completion("ab", (), False), None) == in_ids("ab", ())


def test_another_end_token_becomes_the_actors():
    """Two models with one tokenizer may end their texts differently; the actor learns to write its own end."""
    actor = Actor(micro_model(), TOKENIZER, torch.device("cpu"), (2,))
    assert in_tokens_of(actor, Completion("ab", (67, 68, 5), True), TOKENIZER) == Completion("ab", (67, 68, 2), True)
    endless = Actor(micro_model(), TOKENIZER, torch.device("cpu"), ())
    assert in_tokens_of(endless, Completion("ab", (67, 68, 5), True), TOKENIZER) == Completion("ab", (67, 68), False)


def test_vocabularies_are_compared_once_per_tokenizer(saved, monkeypatch):
    trainer = make(comparator_policy="model", comparator_model_name=saved)
    kind, calls = type(TOKENIZER), []
    real = kind.get_vocab
    monkeypatch.setattr(kind, "get_vocab", lambda self: calls.append(1) or real(self))
    _answers(trainer, 8)
    assert len(calls) <= 4


# one model for all roles

class Letters:
    """The first letter belongs to agent 0, the second to agent 1; a text without both cannot be split."""

    def build_prompt(self, batch_item, agent_prompts):
        return f"{batch_item['answer']}: " + " and ".join(agent_prompts)

    def parse_completion(self, completion, batch_item, num_agents):
        from comlrl_nb.trainers.preference import CentralizedComparatorParseError
        if len(completion) < num_agents:
            raise CentralizedComparatorParseError("too short")
        return list(completion[:num_agents])


CENTRAL = dict(comparator_generation_mode="centralized", centralized_comparator_adapter=Letters())


@pytest.mark.parametrize("policy", LOCAL)
@pytest.mark.parametrize("index", [0, 1])
def test_one_model_writes_for_all_roles(policy, index, saved):
    more = dict(source_of(policy, saved))
    if policy == "model":
        others = [micro_model(45, "gpt2", n_layer=1), micro_model(46, "gpt2", n_layer=1)]
        more = dict(comparator_agents=others)
    trainer = make(comparator_policy=policy, comparator_centralized_agent_index=index, **CENTRAL, **more)
    if trainer.rounds.past is not None:
        trainer.rounds.past.enter(1)
    with asked(trainer) as answers:
        source, models = trainer.rounds.comparator.source, trainer.rounds.comparator.source.open.models
        assert len(models) == 1 and same(weights(models), weights([(others if policy == "model" else trainer.agents)[index]]))
        heard, real = [], source.write
        source.write = lambda prompts, num, items: heard.extend(prompts) or real(prompts, num, items)
        found = answers(3)
    assert heard == [(f"{i}: {row['prompt']} and {row['prompt']}",) for i, row in enumerate(rows())]
    assert all(len(joint) == 2 and all(part == in_ids(part.text) for part in joint) for each in found for joint in each.joints if joint is not None)


def test_one_model_in_the_list_is_enough_for_a_central_comparator():
    one = micro_model(45, "gpt2", n_layer=1)
    trainer = make(comparator_policy="model", comparator_agents=[one], comparator_centralized_agent_index=1, **CENTRAL)
    assert wrote(trainer, [one])


def test_texts_that_cannot_be_split_are_skipped_and_counted():
    agents = team(("gpt2", "gpt2"))
    trainer = make(agents=agents, num_iterations=1, preference_pairs_per_sample=None, pair_selection="all", **CENTRAL)
    # per item the policy writes first (four times "a"), then the comparator: "bc", "b", "", "cb"
    plain, texts = [67], [[68, 69, 2], [68, 2], [2], [69, 68, 2]]
    scripted(agents[1], plain)
    wrote, real = [0], agents[0].generate

    def generate(input_ids, attention_mask, num_return_sequences, **keywords):
        wrote[0] += 1
        chosen = [plain + [2]] * 4 if len(input_ids) == 3 and wrote[0] == 1 else texts
        tail = torch.tensor([[*ids, *[0] * (3 - len(ids))] for _ in range(len(input_ids)) for ids in chosen])
        return torch.cat([input_ids.repeat_interleave(num_return_sequences, 0), tail], 1)

    agents[0].generate = generate
    trainer.train()
    row, = iter_rows(trainer)
    assert row["unsplit"] == 6 and row["unanswered"] == 0 and row["pairs"] + row["tied_pairs"] == 6
    found = {tuple(text for side in ("winner", "loser") for text in pair[f"{side}_completions"]) for pair in stored(trainer)[0]["pairs"]}
    assert found and all({"b", "c"} & set(each) for each in found)


def test_an_item_set_in_which_nothing_can_be_split_is_an_error():
    class Never(Letters):
        def parse_completion(self, completion, batch_item, num_agents):
            return super().parse_completion("", batch_item, num_agents)

    trainer = make(comparator_generation_mode="centralized", centralized_comparator_adapter=Never())
    with pytest.raises(ValueError, match="none of 12 centralised answers could be split into 2 roles by Never.*centralized_comparator_adapter"):
        trainer.train()
    assert not trainer.folder.exists() or not list(trainer.folder.rglob("iteration_*.json"))


def test_without_an_adapter_roles_stand_in_tags():
    agents = team(("gpt2", "gpt2"))
    trainer = make(agents=agents, comparator_generation_mode="centralized")
    ids = in_ids("<agent_1> b </agent_1><agent_0>a</agent_0>").token_ids
    heard = scripted(agents[0], ids)
    found = joints(trainer, 1)
    assert found[0] == [(in_ids("a"), in_ids("b"))]
    prompt = TOKENIZER.decode(heard[0], skip_special_tokens=True)
    assert "Prompt of agent 0:\nsay ab" in prompt and "<agent_1>" in prompt


@pytest.mark.parametrize("kind", ["MADPO", "MARLHF"])
def test_one_actor_for_all_roles_is_compared_with_one_text(kind):
    trainer = make(kind, collaboration_mode="centralized", centralized_comparator_adapter=Halves(), preference_pairs_per_sample=None, pair_selection="all")
    trainer.train()
    assert trainer.args.comparator_generation_mode == "centralized" and trainer.num_agents == 1
    for content in stored(trainer):
        for pair in content["pairs"]:
            assert pair["prompts"][0].startswith("say ab") and " and " in pair["prompts"][0]
            assert all(len(pair[key]) == 1 for key in ("prompts", "winner_completions", "loser_completions", "prompt_token_ids"))
            texts = Halves().parse_completion(pair["winner_completions"][0], {}, 2)
            assert letters(*[[text] for text in texts])[0] == pair["winner_reward"]


def test_one_actors_text_that_cannot_be_split_scores_empty_texts():
    scored = []
    trainer = make(collaboration_mode="centralized", num_iterations=1, reward_func=lambda first, second: scored.append((first[0], second[0])) or letters(first, second))
    trainer.train()
    row, = iter_rows(trainer)
    assert set(scored) == {("", "")} and row["tied_pairs"] == 12 and row["pairs"] == 0 and row["unsplit"] == 0


# a model far away

@pytest.fixture
def serving():
    pytest.importorskip("httpx"), pytest.importorskip("tenacity")
    from remote_servers import serving
    return serving


def echo(seen):
    """Each candidate says who was asked and which one it is."""
    body = seen.body
    return {"completions": [f"{body['agent_idx']}.{k}" for k in range(body["num_return_sequences"])]}


def test_a_remote_comparator_answers_every_role(serving):
    with serving(echo) as server:
        trainer = make(comparator_policy="api", comparator_api_url=server.url, comparator_num_candidates=3, comparator_api_model="far", num_iterations=1)
        trainer.train()
        bodies = sorted((seen.body["prompt"], seen.body["agent_idx"]) for seen in server.seen)
        assert bodies == sorted((row["prompt"], agent) for row in rows() for agent in range(2))
        wanted = dict(num_return_sequences=3, max_new_tokens=3, temperature=1.0, top_p=1.0, model="far")
        assert all({key: seen.body[key] for key in wanted} == wanted and seen.body["batch_item"] in rows() and "top_k" not in seen.body for seen in server.seen)
    content, = stored(trainer)
    for pair in content["pairs"]:
        mine = "loser" if pair["target_raw_reward"] == pair["loser_reward"] else "winner"
        other = {"winner": "loser", "loser": "winner"}[mine]
        k = pair[f"{other}_completions"][0][-1]
        assert pair[f"{other}_completions"] == [f"0.{k}", f"1.{k}"]
        assert [tuple(ids) for ids in pair[f"{other}_tokens"]["ids"]] == [in_ids(text).token_ids for text in pair[f"{other}_completions"]]


def test_missing_answers_are_skipped_and_counted(serving):
    def half(seen):
        body = seen.body
        texts = [f"{body['agent_idx']}.{k}" for k in range(body["num_return_sequences"])]
        texts[1 if body["agent_idx"] else 2] = ""
        return {"completions": texts}

    with serving(half) as server:
        trainer = make(comparator_policy="api", comparator_api_url=server.url, num_iterations=1, preference_pairs_per_sample=None, pair_selection="all")
        scored, real = [], trainer.setup.reward.score
        trainer.setup.reward.score = lambda prompts, texts, item, index: scored.append(texts) or real(prompts, texts, item, index)
        trainer.train()
    row, = iter_rows(trainer)
    assert row["unanswered"] == 6 and row["pairs"] + row["tied_pairs"] == 6
    assert [[list(each) for each in texts] for texts in scored if texts[0][0].startswith("0.")] == [[["0.0", "1.0"], ["0.3", "1.3"]]] * 3
    assert all(text is not None and text != "None" for content in stored(trainer) for pair in content["pairs"] for text in pair["winner_completions"] + pair["loser_completions"])


def test_a_round_without_any_answer_is_an_empty_round(serving):
    with serving(lambda seen: {"completions": [""] * seen.body["num_return_sequences"]}) as server:
        trainer = make(comparator_policy="api", comparator_api_url=server.url, num_iterations=1)
        before = weights(trainer)
        trainer.train()
    row, = iter_rows(trainer)
    assert row["unanswered"] == 12 and row["pairs"] == 0 and "comparator_reward_mean" not in row and "win_rate" not in row
    assert stored(trainer) == [{"iteration": 1, "num_pairs": 0, "pairs": []}] and same(weights(trainer), before)


def test_a_remote_model_writes_for_all_roles(serving):
    texts = ["<agent_0>a</agent_0><agent_1>b</agent_1>", "nothing", "<agent_1>c</agent_1>", ""]
    with serving(lambda seen: {"completions": texts[:seen.body["num_return_sequences"]]}) as server:
        trainer = make(comparator_policy="api", comparator_api_url=server.url, comparator_generation_mode="centralized", comparator_centralized_agent_index=1)
        found = _answers(trainer, 4)
        assert [(seen.body["agent_idx"], "<agent_0>" in seen.body["prompt"]) for seen in server.seen] == [(1, True)] * 3
    for each in found:
        assert each.joints == [(in_ids("a"), in_ids("b")), None, (in_ids(""), in_ids("c")), None] and (each.unanswered, each.unsplit) == (1, 1)


def test_a_failing_server_leaves_the_run_where_it_was(serving):
    from comlrl_nb.remote_formats import RemoteError
    from remote_servers import Reply

    broken = [True]
    with serving(lambda seen: Reply(400, {"error": "no such model"}) if broken[0] else echo(seen)) as server:
        more = dict(comparator_policy="api", comparator_api_url=server.url)
        trainer, whole = make(**more), make(**more)
        with pytest.raises(RemoteError, match="no such model"):
            trainer.train()
        broken[0] = False
        trainer.train(), whole.train()
    assert_same_run(trainer, whole)
    assert len(files(trainer.rounds.store.index.folder)) == 2


def test_the_key_is_in_nothing_that_a_run_leaves(serving, tmp_path):  # C67
    """Neither in its files nor in what it shows, after a good round and after a provider that repeats the key in its refusal."""
    from comlrl_nb.utils.reward_utils import set_reward_range
    from remote_servers import Reply
    key, refused = "sk-SECRET-9876543210", []

    def ranged(first, second):
        return letters(first, second)

    set_reward_range(ranged, -5.0, 5.0)

    def answer(seen):
        if seen.headers.get("authorization") != f"Bearer {key}":
            refused.append(seen)
        if len(server.seen) > 6:
            return Reply(401, {"error": {"message": f"the key {key} has no credit"}})
        return echo(seen)

    with serving(answer) as server:
        trainer = make(comparator_policy="api", comparator_api_url=server.url, comparator_api_key=key, reward_func=ranged, history_file=str(tmp_path / "history.jsonl"),
                       log_reward_distribution=True, output_dir=str(tmp_path / "runs"))
        with pytest.raises(Exception) as caught:
            trainer.train(checkpoint_dir=tmp_path / "kept", checkpoint_interval=1, checkpoint_unit="updates")
        trainer.save_checkpoint(tmp_path / "by hand")
        trainer.save_model(tmp_path / "model")
    assert not refused and "401" in str(caught.value) and len(stored(trainer)) == 1
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"history.jsonl", "iteration_0001.json", "state.json", "metadata.json"} <= {path.name for path in left}
    shown = [str(caught.value), repr(caught.value), repr(caught.value.__cause__), repr(trainer), repr(trainer.args), str(trainer.history), repr(list(trainer.history)), repr(trainer.rounds.comparator)]
    assert [path for path in left if key[3:].encode() in path.read_bytes()] == [] and [text for text in shown if key[3:] in text] == []

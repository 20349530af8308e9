"""What every trainer's `save_model` wrote is read back bit for bit, shared objects as one object, and can be trained on."""

import json

import pytest
import torch

from checkpoint_runs import RUNS, make
from comlrl_nb.models.actor_critic import HEAD_FILE, CausalLMWithValueHead
from comlrl_nb.saved import TEAM_FILE, load_agents, load_critics, load_reward_model
from reinforce_runs import team

SIMPLE = ("MAGRPO", "MAREINFORCE", "MARLOO", "MAReMax", "CentralizedMAGRPO", "MAAC", "IAC", "IAC-heads", "MADPO", "MARLHF-magrpo", "MARLHF-iac", "MADPOIter", "MARLHFIter")


def same(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(first[key].dtype == second[key].dtype and torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", SIMPLE)
def test_a_trained_team_is_read_back(name, tmp_path):
    assert name in RUNS
    trainer = make(name, tmp_path / "runs")
    trainer.train()
    trainer.save_model(tmp_path / "model")
    loaded = load_agents(tmp_path / "model")
    saved = [actor.module if (tmp_path / "model" / f"agent_{index}" / HEAD_FILE).exists() else actor.model for index, actor in enumerate(trainer.team.actors)]
    assert len(loaded.models) == len(saved) and all(map(same, loaded.models, saved))
    assert [each.get_vocab() for each in loaded.tokenizers] == [actor.tokenizer.get_vocab() for actor in trainer.team.actors]
    if trainer.critics:
        assert all(map(same, load_critics(tmp_path / "model"), trainer.critics)) and len(load_critics(tmp_path / "model")) == len(trainer.critics)
    else:
        with pytest.raises(ValueError, match="no critic with a value head"):
            load_critics(tmp_path / "model")
    if getattr(trainer, "reward_model", None) is not None:
        judge = load_reward_model(tmp_path / "model")
        assert same(judge, trainer.reward_model) and not any(parameter.requires_grad for parameter in judge.parameters()) and not judge.training
    else:
        with pytest.raises(ValueError, match="no reward model was saved"):
            load_reward_model(tmp_path / "model")


@pytest.mark.parametrize("name", ["MAGRPO", "IAC-heads", "MADPO"])
def test_one_object_for_two_agents_stays_one(name, tmp_path):
    model = team(("gpt2",))[0]
    trainer = make(name, tmp_path / "runs", agents=[model, model])
    trainer.save_model(tmp_path / "model")
    loaded = load_agents(tmp_path / "model")
    assert loaded.models[0] is loaded.models[1] and loaded.owners == [0, 0]
    again = make(name, tmp_path / "more", agents=loaded.models, tokenizer=loaded.tokenizers)
    assert again.optimizers[0] is again.optimizers[1]
    again.train()
    assert not same(again.team.modules[0], trainer.team.modules[0]) and again.team.modules[0] is again.team.modules[1]


def test_agents_apart_stay_apart(tmp_path):
    make("MAGRPO", tmp_path / "runs").save_model(tmp_path / "model")
    loaded = load_agents(tmp_path / "model")
    assert loaded.models[0] is not loaded.models[1] and loaded.owners == [0, 1]


def test_what_is_not_a_saved_team_is_named(tmp_path):
    with pytest.raises(ValueError, match="has no folder agent_0"):
        load_agents(tmp_path)
    make("IAC", tmp_path / "runs").save_model(tmp_path / "model")
    (tmp_path / "model" / "agent_1" / "critic" / HEAD_FILE).unlink()
    with pytest.raises(ValueError, match="agent_1/critic holds no critic with a value head"):
        load_critics(tmp_path / "model")
    (tmp_path / "model" / TEAM_FILE).write_text(json.dumps({"agents": [0, 1, 1], "critics": {}, "reward_model": False}))
    with pytest.raises(ValueError, match="tells of 3 agents"):
        load_agents(tmp_path / "model")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"agents": [0, 5], "critics": {}, "reward_model": false}', '{"agents": [1, 0], "critics": {}, "reward_model": false}', '{"agents": [0, "0"], "critics": {}, "reward_model": false}', '{"agents": [0, 1], "critics": [0]}', '{"agents": [0, 1], "critics": {}, "reward_model": 1}'])
def test_a_team_file_that_cannot_be_understood_is_named(content, tmp_path):
    make("MAGRPO", tmp_path / "runs").save_model(tmp_path / "model")
    (tmp_path / "model" / TEAM_FILE).write_text(content)
    with pytest.raises(ValueError, match="team.json is missing or not what save_model wrote"):
        load_agents(tmp_path / "model")


def test_what_another_team_left_in_the_folder_is_not_read(tmp_path):
    make("MAAC", tmp_path / "a").save_model(tmp_path / "model")
    separate = make("IAC", tmp_path / "b")
    separate.save_model(tmp_path / "model")
    assert len(load_critics(tmp_path / "model")) == 2 and all(map(same, load_critics(tmp_path / "model"), separate.critics))
    make("IAC-heads", tmp_path / "c").save_model(tmp_path / "model")
    judged = make("MARLHF-magrpo", tmp_path / "e")
    judged.train()
    judged.save_model(tmp_path / "model")
    assert same(load_reward_model(tmp_path / "model"), judged.reward_model)
    plain = make("MAGRPO", tmp_path / "d")
    plain.save_model(tmp_path / "model")
    assert all(map(same, load_agents(tmp_path / "model").models, plain.agents))
    with pytest.raises(ValueError, match="no critic"):
        load_critics(tmp_path / "model")
    with pytest.raises(ValueError, match="no reward model was saved"):
        load_reward_model(tmp_path / "model")


def test_one_critic_for_several_agents_stays_one(tmp_path):
    critic = CausalLMWithValueHead(team(("gpt2",))[0])
    make("IAC", tmp_path / "runs", critics=[critic, critic]).save_model(tmp_path / "model")
    first, second = load_critics(tmp_path / "model")
    assert first is second and same(first, critic)

"""MADPO and the REINFORCE family on accelerators: run with `pytest -m gpu` on a machine that has them."""
import threading

import pytest
import torch

from comlrl_nb import toy
from comlrl_nb.demo import demo_trainer
from comlrl_nb.policy_update import policy_update
from reinforce_runs import Trees, letters, make, onward, rows, same, team, walked, weights

pytestmark = pytest.mark.gpu
COUNT = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
NAME = f"{torch.accelerator.current_accelerator().type}" if COUNT else "none"
TASK = toy.TASKS["delivery"]
one = pytest.mark.skipif(COUNT < 1, reason="needs one accelerator")
two = pytest.mark.skipif(COUNT < 2, reason="needs two accelerators")


def stepped(**changes):
    trainer = demo_trainer(TASK, **changes)
    stats = [trainer.step(TASK.train[8 * k:8 * k + 8]) for k in range(3)]
    return trainer, stats


@one
def test_two_agents_on_one_accelerator():
    trainer, stats = stepped()
    assert all(next(model.parameters()).device.type == NAME for model in trainer.agents)
    assert stats[0]["loss"] == pytest.approx(0.6931, abs=1e-3) and stats[-1]["loss"] < 0.75


@one
def test_the_same_pairs_give_the_same_margins_as_on_the_cpu():
    trainer, other = demo_trainer(TASK), demo_trainer(TASK, parallel_training="mp", agent_devices="cpu")
    pairs = other.collect(TASK.train[:4])
    here, there = trainer.train_on(pairs, epochs=1), other.train_on(pairs, epochs=1)
    assert here["loss"] == pytest.approx(there["loss"], rel=1e-3)
    again = trainer.train_on(pairs, epochs=1)["margin"], other.train_on(pairs, epochs=1)["margin"]
    assert again[0] == pytest.approx(again[1], rel=2e-2)


@one
def test_references_elsewhere():
    trainer, _ = stepped(reference_devices="cpu")
    assert all(next(model.parameters()).device.type == "cpu" for model in trainer.reference_models)


@one
def test_the_random_streams_of_an_accelerator_repeat():
    prompts = [["the van", "the van"]]
    first, second = (demo_trainer(TASK).team.sample(prompts, 4) for _ in range(2))
    assert first == second


@two
def test_two_agents_on_two_accelerators():
    devices = [f"{NAME}:0", f"{NAME}:1"]
    trainer, stats = stepped(parallel_training="mp", agent_devices=devices)
    assert [str(next(model.parameters()).device) for model in trainer.agents] == devices and stats[-1]["loss"] < 0.75


# the REINFORCE family

FIRST = f"{NAME}:0"
HERE = dict(parallel_training="mp", agent_devices=FIRST)
TURNS = dict(num_turns=2, num_generations=2, external_transition=onward, eval_dataset=rows(2), eval_interval=2)


def home(model):
    return str(next(model.parameters()).device)


class Judge(torch.nn.Module):
    """A reward model on a device of its own: it embeds bytes, and its values stay on that device."""

    def __init__(self, device):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(256, generator=generator).to(device))
        self.threads = set()

    def score(self, first, second):
        self.threads.add(threading.current_thread())
        ids = torch.tensor(list((first[0] + "|" + second[0]).encode()), device=self.table.device)
        return self.table[ids].mean()


def trained(agents=None, **more):
    trainer = make(agents or team(("gpt2", "llama")), **more)
    before = weights(trainer)
    trainer.train()
    assert all(not same([old], [new]) for old, new in zip(before, weights(trainer)))
    return trainer


@one
@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
def test_magrpo_two_agents_on_one_accelerator(joint_mode):
    trainer = trained(joint_mode=joint_mode, **HERE, **TURNS)
    assert [home(model) for model in trainer.agents] == [FIRST] * 2 and not trainer.team.workers.parallel
    assert trainer.env_step == trainer.plan().joint_responses_per_item * 3


@one
def test_magrpo_takes_the_first_accelerator_by_itself():
    assert {home(model) for model in trained().agents} == {FIRST}


@one
def test_magrpo_the_same_nodes_give_the_same_update_as_on_the_cpu():
    trees = Trees()
    there = make(team(("gpt2", "llama")), parallel_training="mp", agent_devices="cpu", callbacks=[trees], num_turns=2)
    here = make(team(("gpt2", "llama")), **HERE)
    stats = there.step(rows(3))
    loss, own = policy_update(here.team, walked(trees.of("policy")))
    assert loss == pytest.approx(stats["loss"], rel=1e-3, abs=1e-4)
    for agent in range(2):
        assert own[f"agent_{agent}/grad_norm"] == pytest.approx(stats[f"agent_{agent}/grad_norm"], rel=1e-2)


@one
def test_magrpo_the_same_seed_is_the_same_sampling_on_an_accelerator():
    first, second = (make(**HERE).rollout(rows()[0], 4) for _ in range(2))
    assert [generation.completions for generation in first.generations] == [generation.completions for generation in second.generations]


@one
def test_magrpo_tied_groups_leave_the_weights_on_an_accelerator():
    trainer = make(reward_func=lambda a, b: 0.3, **HERE, **TURNS)
    before = weights(trainer)
    trainer.train()
    assert same(before, weights(trainer))


@one
@pytest.mark.parametrize("devices", ["cpu", None, ["cpu", FIRST]])
def test_magrpo_references_and_a_reward_model_elsewhere(devices):
    judge = Judge("cpu")
    trainer = trained(reward_func=judge.score, reference_kl_enabled=True, reference_devices=devices, **HERE, **TURNS)
    expected = [FIRST] * 2 if devices is None else [devices] * 2 if isinstance(devices, str) else devices
    assert [home(model) for model in trainer.reference_models] == expected and judge.threads == {threading.main_thread()}
    assert trainer.history["turn_1/reference_kl_mean"].iloc[-1] > 0 and judge.table.grad is None


@one
def test_magrpo_a_reward_model_on_the_accelerator():
    judge, plain = Judge(FIRST), Judge("cpu")
    first, second = (make(reward_func=each.score, **HERE).rollout(rows()[0]) for each in (judge, plain))
    assert [joint.reward for joint in first.joints] == pytest.approx([joint.reward for joint in second.joints], rel=1e-5)


@one
def test_magrpo_one_agent_on_an_accelerator_and_one_on_the_cpu():
    more = dict(reference_kl_enabled=True, reference_devices=["cpu", FIRST], **TURNS)
    trainer = trained(parallel_training="mp", agent_devices=[FIRST, "cpu"], **more)
    assert trainer.team.workers.parallel and [home(model) for model in trainer.agents] == [FIRST, "cpu"]
    assert [home(model) for model in trainer.reference_models] == ["cpu", FIRST]


@one
def test_magrpo_shared_agents_on_an_accelerator():
    model, = team(("gpt2",))
    trainer = make([model, model], **HERE)
    before = weights(trainer)
    trainer.train()
    assert trainer.optimizers[0] is trainer.optimizers[1] and not same(before, weights(trainer))


@one
def test_magrpo_saved_from_an_accelerator(tmp_path):
    from transformers import AutoModelForCausalLM
    trainer = trained(**HERE)
    trainer.save_model(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "agent_0")
    assert all(torch.equal(value.cpu(), back.state_dict()[name]) for name, value in trainer.agents[0].state_dict().items())


@two
@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
def test_magrpo_two_agents_on_two_accelerators(joint_mode):
    devices = [f"{NAME}:0", f"{NAME}:1"]
    trainer = trained(joint_mode=joint_mode, parallel_training="mp", agent_devices=devices, reference_kl_enabled=True, reference_devices=devices[::-1], reward_func=Judge(devices[1]).score, **TURNS)
    assert trainer.team.workers.parallel and [home(model) for model in trainer.agents] == devices
    assert [home(model) for model in trainer.reference_models] == devices[::-1]


@two
def test_magrpo_two_accelerators_repeat_themselves():
    more = dict(parallel_training="mp", agent_devices=[f"{NAME}:0", f"{NAME}:1"], reward_func=letters)
    first, second = (make(**more).rollout(rows()[0]) for _ in range(2))
    assert first.joints == second.joints


@two
def test_magrpo_the_first_error_wins_on_two_accelerators():
    trainer = make(parallel_training="mp", agent_devices=[f"{NAME}:0", f"{NAME}:1"])
    errors = [RuntimeError("agent 0"), RuntimeError("agent 1")]
    for model, error in zip(trainer.agents, errors):
        model.register_forward_pre_hook(lambda module, inputs, error=error: (_ for _ in ()).throw(error))
    with pytest.raises(RuntimeError) as caught:
        trainer.train()
    assert caught.value is errors[0]

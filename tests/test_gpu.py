"""MADPO on accelerators: run with `pytest -m gpu` on a machine that has them."""
import pytest
import torch

from comlrl_nb import toy
from comlrl_nb.demo import demo_trainer

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

"""Learning curves of the REINFORCE family on the embedded tasks, in one thread."""
import time

import pytest

from comlrl_nb import toy
from comlrl_nb.trainers.reinforce import (CentralizedMAGRPOTrainer, MAGRPOTrainer, MAREINFORCETrainer, MAReMaxTrainer, MARLOOTrainer)

pytestmark = pytest.mark.slow
SAMPLES = 8
SETTINGS = dict(num_generations=8, rollout_buffer_size=8, agent_learning_rate=6e-4, num_train_epochs=6, num_turns=1, temperature=1.0, top_p=1.0,
                top_k=None, max_new_tokens=12, eval_interval=0, eval_num_samples=20 * SAMPLES, eval_batch_size=20 * SAMPLES, seed=0)


def make(trainer_class, task, agents=None, formatters=None, **fields):
    def look(agent_completions_turns, batch_items, prompts):
        last = [[turns[-1] for turns in agent] for agent in agent_completions_turns]
        return [(task.reward_func(*([text] for text in joint), batch_items=[row])[0], sum(map(toy.well_formed, joint)) / len(joint))
                for row, joint in zip(batch_items, zip(*last))]

    def summarise(details, num_turns):
        rewards, shares = zip(*details)
        return {"last_reward": sum(rewards) / len(rewards), "well_formed": sum(shares) / len(shares)}

    agents = agents or [toy.load_model() for _ in range(task.num_agents)]
    args = trainer_class.config_class(**{**SETTINGS, "num_agents": task.num_agents, **{name: value for name, value in fields.items() if name != "transition"}})
    turns = {"external_transition": fields["transition"]} if "transition" in fields else {}
    return trainer_class(agents=agents, tokenizer=toy.load_tokenizer(), num_agents=task.num_agents, reward_func=task.reward_func,
                         formatters=formatters or task.formatters, train_dataset=task.train, eval_dataset=[row for row in task.eval for _ in range(SAMPLES)],
                         eval_logger=look, eval_aggregator=summarise, args=args, callbacks=[], **turns)


def figures(trainer):
    stats = trainer.evaluate()
    return stats["eval/last_reward"], stats["eval/well_formed"]


def trained(trainer):
    """Reward before, reward and well-formed share after, seconds."""
    before, _ = figures(trainer)
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    return before, *figures(trainer), seconds


@pytest.mark.parametrize("trainer_class", [MAGRPOTrainer, MAREINFORCETrainer, MARLOOTrainer, MAReMaxTrainer], ids=lambda cls: cls.algorithm_name)
def test_each_of_the_four_learns_the_delivery_within_two_minutes(trainer_class):
    before, reward, well_formed, seconds = trained(make(trainer_class, toy.TASKS["delivery"]))
    assert before < 0.4 and reward >= 0.6 and well_formed >= 0.9 and seconds < 120


def test_one_actor_learns_to_write_for_three_roles():
    trainer = make(CentralizedMAGRPOTrainer, toy.TASKS["search"], [toy.load_model()], max_new_tokens=48)
    before, reward, well_formed, _ = trained(trainer)
    assert before < 0.4 and reward >= 0.6 and well_formed >= 0.9


def test_two_agents_that_are_one_model_learn():
    model = toy.load_model()
    before, reward, well_formed, _ = trained(make(MAGRPOTrainer, toy.TASKS["delivery"], [model, model], num_train_epochs=3))
    assert before < 0.4 and reward >= 0.6 and well_formed >= 0.9


# ---- two turns

def ask_hour_alone(row):
    return f"we have time at {row['hour']}. when do we meet?"


def tell(agent_completions, prompt_history_per_agent, **_):
    asked = [own[0] for own in prompt_history_per_agent]
    return [asked[0], f"{agent_completions[0]} {asked[1]}"]


@pytest.mark.parametrize("seed", range(3))
def test_hearing_the_other_in_a_second_turn_pays(seed):
    task = toy.TASKS["meeting"]
    common = dict(formatters=[toy.ask_room, ask_hour_alone], num_generations=4, seed=seed)
    once = make(MAGRPOTrainer, task, num_train_epochs=20, rollout_buffer_size=10, **common)
    twice = make(MAGRPOTrainer, task, num_train_epochs=4, rollout_buffer_size=20, num_turns=2, external_prompt_passthrough=True, transition=tell, **common)
    _, one_turn, *_ = trained(once)
    _, two_turns, well_formed, _ = trained(twice)
    assert once.env_step == twice.env_step == 4800
    assert two_turns >= one_turn + 0.15 and well_formed >= 0.9

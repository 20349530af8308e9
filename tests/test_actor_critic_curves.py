"""Learning curves of MAAC and IAC on the embedded tasks, in one thread."""
import time

import pytest

from comlrl_nb import toy
from comlrl_nb.trainers.actor_critic import IACConfig, IACTrainer, MAACConfig, MAACTrainer

pytestmark = pytest.mark.slow
SAMPLES = 8
SETTINGS = dict(num_turns=1, agent_learning_rate=6e-4, critic_learning_rate=6e-4, num_generations=8, rollout_buffer_size=64, num_train_epochs=4, max_new_tokens=12,
                temperature=1.0, top_p=1.0, eval_interval=0, eval_num_samples=20 * SAMPLES, eval_batch_size=20 * SAMPLES, seed=0)
VARIANTS = {"MAAC V": dict(critic_type="v"), "MAAC Q": dict(critic_type="q"), "IAC separate": dict(use_separate_critic=True), "IAC shared": dict(use_separate_critic=False)}


def well_formed(samples):
    return {"well_formed": sum(toy.well_formed(one.completion) for one in samples) / len(samples)}


def make(variant, task, **fields):
    agents = [toy.load_model() for _ in range(task.num_agents)]
    fields = {**SETTINGS, "num_agents": task.num_agents, **VARIANTS[variant], **fields}
    call = dict(agents=agents, tokenizer=toy.load_tokenizer(), reward_func=task.reward_func, formatters=task.formatters, train_dataset=task.train,
                eval_dataset=[row for row in task.eval for _ in range(SAMPLES)], metrics_callback=well_formed, callbacks=[])
    if variant.startswith("MAAC"):
        return MAACTrainer(critic_model=toy.load_model(), args=MAACConfig(**fields), **call)
    critics = {"critics": [toy.load_model() for _ in agents]} if fields["use_separate_critic"] else {}
    return IACTrainer(args=IACConfig(**fields), **critics, **call)


def figures(trainer):
    stats = trainer.evaluate()
    return stats["eval/turn_1/reward_mean"], stats["eval/well_formed"]


def trained(trainer):
    """Reward before, reward and well-formed share after, seconds."""
    before, _ = figures(trainer)
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    return before, *figures(trainer), seconds


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_learns_the_delivery_within_three_minutes(variant):
    before, reward, share, seconds = trained(make(variant, toy.TASKS["delivery"]))
    print(f"{variant}: {before:.3f} -> {reward:.3f}, well-formed {share:.3f}, {seconds:.0f} s")
    assert before < 0.4 and reward >= 0.6 and share >= 0.9 and seconds < 180


@pytest.mark.parametrize("name", ["meeting", "search"])
def test_the_other_tasks_are_learned_too(name):
    before, reward, share, _ = trained(make("IAC shared", toy.TASKS[name]))
    print(f"{name}: {before:.3f} -> {reward:.3f}, well-formed {share:.3f}")
    assert before < 0.4 and reward >= 0.6 and share >= 0.9


def test_default_learning_rates_hardly_move_the_team():
    before, reward, _, _ = trained(make("MAAC V", toy.TASKS["delivery"], agent_learning_rate=5e-6, critic_learning_rate=5e-6))
    assert abs(reward - before) < 0.15

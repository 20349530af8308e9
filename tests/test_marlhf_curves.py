"""Learning curves of MARLHF on the embedded task, in one thread: a judge learned from pairs, and the task reward on held-out items."""
import time

import pytest

from comlrl_nb import toy
from comlrl_nb.demo import measure
from comlrl_nb.trainers.collecting import collect_pairs
from comlrl_nb.trainers.preference import MARLHFConfig, MARLHFTrainer

pytestmark = pytest.mark.slow
TASK, SAMPLES = toy.TASKS["delivery"], 4
SETTINGS = dict(preference_num_candidates=48, preference_pairs_per_sample=32, reward_learning_rate=1e-3, reward_num_train_epochs=4, reward_train_batch_size=8, agent_learning_rate=6e-4,
                critic_learning_rate=6e-4, num_generations=8, rollout_buffer_size=8, num_train_epochs=3, max_new_tokens=12, temperature=1.0, top_p=1.0, top_k=None, eval_interval=0,
                eval_num_samples=20 * SAMPLES, eval_batch_size=20 * SAMPLES, logging_steps=1, seed=0)
PENALTY = dict(reference_kl_enabled=True, reference_kl_coef=3.0)


def make(algorithm="magrpo", **fields):
    return MARLHFTrainer(agents=[toy.load_model(), toy.load_model()], tokenizer=toy.load_tokenizer(), reward_func=TASK.reward_func, formatters=TASK.formatters, train_dataset=TASK.train,
                         eval_dataset=[row for row in TASK.eval for _ in range(SAMPLES)], args=MARLHFConfig(rl_algorithm=algorithm, **{**SETTINGS, **fields}), callbacks=[])


@pytest.mark.parametrize("algorithm, buffer", [("magrpo", 8), ("maac", 32), ("iac", 32)])
def test_the_task_reward_doubles_within_four_minutes(algorithm, buffer):
    trainer = make(algorithm, rollout_buffer_size=buffer, **PENALTY)
    before, _ = measure(trainer, TASK.eval)
    started = time.perf_counter()
    pairs = trainer.collect()
    trainer.train_on(pairs)
    seconds = time.perf_counter() - started
    after, _ = measure(trainer, TASK.eval)
    assert before["reward"] < 0.4 and after["reward"] >= 2 * before["reward"] and after["well_formed"] >= 0.9 and seconds < 240


@pytest.mark.parametrize("algorithm", ["mareinforce", "marloo", "maremax"])
def test_the_other_back_ends_raise_the_judges_score(algorithm):
    trainer = make(algorithm, preference_num_candidates=32, preference_pairs_per_sample=16, num_train_epochs=2, eval_interval=60)
    trainer.train()
    scores = [row["eval/reward_model/score_mean"] for row in trainer.history if "eval/reward_model/score_mean" in row]
    assert trainer.evaluate()["eval/reward_model/score_mean"] > scores[0]


def test_a_judge_of_few_pairs_is_hacked():
    """Its score goes up; the task reward does not follow."""
    trainer = make(reward_num_train_epochs=8, eval_interval=60)
    trainer.train_on(trainer.collect(TASK.train[:4]))
    first = next(row for row in trainer.history if "eval/reward_model/score_mean" in row)
    last = trainer.evaluate()
    assert last["eval/reward_model/score_mean"] > first["eval/reward_model/score_mean"] + 0.5
    assert last["eval/turn_1/reward_mean"] < 2 * first["eval/turn_1/reward_mean"]


def test_the_judge_tells_pairs_apart_that_it_did_not_learn_from():
    trainer = make()
    got = collect_pairs(trainer, None, 8)
    stats = trainer.fit(got.pairs, got.left_out)
    assert stats["reward_model/pairs_accuracy"] > 0.8 and stats["reward_model/left_out_accuracy"] > 0.7

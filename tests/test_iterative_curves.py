"""Learning curves of the iterative trainers on the embedded task, in one thread: the task reward on held-out items."""
import time

import pytest
import torch

from comlrl_nb import toy
from comlrl_nb.callbacks import Callback
from comlrl_nb.demo import measure
from comlrl_nb.trainers.configs import MADPOIterConfig, MARLHFIterConfig
from comlrl_nb.trainers.preference.iterative import MADPOIterTrainer, MARLHFIterTrainer

pytestmark = pytest.mark.slow
TASK = toy.TASKS["delivery"]
COMMON = dict(comparator_policy="current", agent_learning_rate=6e-4, num_train_epochs=1, max_new_tokens=12, temperature=1.0, top_p=1.0, top_k=None, eval_interval=0, logging_steps=1, seed=0)
DIRECT = dict(num_iterations=7, preference_num_candidates=16, preference_pairs_per_sample=8, train_batch_size=64, dpo_beta=0.2, dpo_reference=True, score_last_token=True)
JUDGED = dict(num_iterations=3, preference_num_candidates=32, preference_pairs_per_sample=16, reward_learning_rate=1e-3, reward_num_train_epochs=2, reward_train_batch_size=8,
              num_generations=8, rollout_buffer_size=8, reference_kl_enabled=True, reference_kl_coef=3.0)
TRAINERS = {"madpo": (MADPOIterTrainer, MADPOIterConfig, DIRECT), "marlhf": (MARLHFIterTrainer, MARLHFIterConfig, JUDGED)}


def make(kind, folder, callbacks=(), rows=TASK.train, **fields):
    trainer_class, args_class, settings = TRAINERS[kind]
    return trainer_class(agents=[toy.load_model(), toy.load_model()], tokenizer=toy.load_tokenizer(), reward_func=TASK.reward_func, formatters=list(TASK.formatters),
                         train_dataset=list(rows), args=args_class(output_dir=str(folder), **{**COMMON, **settings, **fields}), callbacks=list(callbacks))


class Measuring(Callback):
    def on_row(self, row):
        if row["kind"] == "iter":
            measure(self.trainer, TASK.eval, 2)


@pytest.mark.parametrize("kind", TRAINERS)
def test_the_task_is_learned_within_four_minutes(kind, tmp_path):
    trainer = make(kind, tmp_path)
    before, _ = measure(trainer, TASK.eval)
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    after, _ = measure(trainer, TASK.eval)
    assert before["reward"] < 0.4 and after["reward"] >= 0.6 and after["well_formed"] >= 0.9 and seconds < 240


@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
def test_every_lambda_learns_the_task_with_the_same_number_of_updates(lam, tmp_path):
    trainer = make("madpo", tmp_path, num_iterations=8, preference_num_candidates=4, preference_pairs_per_sample=1, preference_replay_mode="lambda_decay", preference_replay_lambda=lam,
                   preference_replay_sample_size=192)
    trainer.train()
    after, _ = measure(trainer, TASK.eval)
    assert trainer.run.update == 24 and after["reward"] >= 0.6 and after["well_formed"] >= 0.9


def test_measuring_between_rounds_changes_nothing(tmp_path):
    watch = Measuring()
    plain, watched = make("madpo", tmp_path / "plain", rows=TASK.train[:8], num_iterations=3), make("madpo", tmp_path / "watched", [watch], TASK.train[:8], num_iterations=3)
    watch.trainer = watched
    plain.train()
    watched.train()
    for one, other in zip(plain.agents, watched.agents):
        assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values()))


def test_a_judge_that_labels_its_own_rounds_leads_away_from_the_task(tmp_path):
    """The task reward ends below that of the run with the task's labels."""
    task, judge = make("marlhf", tmp_path / "task"), make("marlhf", tmp_path / "judge", preference_scoring_reward="reward_model")
    task.train()
    judge.train()
    assert measure(judge, TASK.eval)[0]["reward"] < measure(task, TASK.eval)[0]["reward"]

"""Plots and figures of critics: what they take, what they return, what they refuse."""
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from comlrl_nb.diagnostics import (Bin, GradientNoise, RecentRollouts, calibration, experiences_of, gradient_noise, judge, noise_interval, plot_advantages,
                                   plot_calibration, plot_gradient_noise, plot_reward_distributions, plot_reward_means, plot_shared_and_own, plot_td_errors,
                                   realised_returns, score_products)
from comlrl_nb.distributions import BothRewards, distribution_stats, write_distribution
from comlrl_nb.experience import Experience, JointSample, normalized
from comlrl_nb.history import History
from comlrl_nb.logprobs import completion_logprobs_naive
from comlrl_nb.types import Completion, Prompt
from actor_critic_runs import KINDS, TWO_TURNS, everything, letters, make, rows, same, trained
from reinforce_runs import make as make_without_critic


@pytest.fixture(autouse=True)
def no_open_figures():
    yield
    plt.close("all")


def experience(agent=0, turn=0, signal=0.0, value=0.0, text="a"):
    return Experience(agent, turn, Prompt("?", (4,)), Completion(text, (7, 2), True), (4,), signal, signal, 0.0, value, signal, signal - value, signal - value, signal)


def sample(*signals, turn=0, item=0, values=None):
    """A joint sample with one signal per agent."""
    return JointSample({"item": item}, turn, 0, tuple(experience(agent, turn, signal, values[agent] if values else 0.0) for agent, signal in enumerate(signals)))


# ---- rollouts

def test_the_last_played_items_are_kept():
    recent = RecentRollouts(count=2)
    trainer = trained(callbacks=[recent], train_dataset=rows(5), eval_dataset=rows(3), eval_interval=1)
    assert [node.item for node in recent.nodes] == rows(5)[3:] and trainer.env_step == 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("play", [dict(num_generations=3), TWO_TURNS], ids=["three samples", "two turns"])
def test_judging_asks_the_critics_of_now_and_changes_nothing(kind, play):
    trainer = make(**KINDS[kind], **play)
    nodes = [trainer.rollout(row) for row in rows(3)]
    before, states = everything(trainer), [stream.state_dict() for stream in trainer.setup.streams.values()]
    samples = judge(trainer, nodes)
    walked = [node for root in nodes for node in root.walk()]
    said = trainer.critic_group.values(trainer.team, walked)
    for node, values in zip(walked, said):
        mine = [one for one in samples if one.item == node.item and one.turn == node.turn]
        assert [[one.experiences[agent].value for one in mine] for agent in range(2)] == [list(row) for row in values]
        assert [one.experiences[0].td_error for one in mine] == pytest.approx(list(node.advantages[0]), abs=1e-6)
    assert same(everything(trainer), before) and str([stream.state_dict() for stream in trainer.setup.streams.values()]) == str(states)


def test_critics_judge_what_another_team_played():
    one, other = make(**KINDS["MAAC-V"], num_generations=2), make(**KINDS["IAC-V"], num_generations=2)
    nodes = [one.rollout(row) for row in rows(2)]
    shared, own = judge(one, nodes), judge(other, nodes)
    assert [[e.completion for e in s.experiences] for s in shared] == [[e.completion for e in s.experiences] for s in own]
    assert all(s.experiences[0].value == s.experiences[1].value for s in shared) and any(s.experiences[0].value != s.experiences[1].value for s in own)


def test_what_cannot_be_judged():
    trainer = make()
    with pytest.raises(ValueError, match="trainer.*MAACTrainer, IACTrainer.*MAGRPOTrainer"):
        judge(make_without_critic(), [trainer.rollout(rows(1)[0])])
    with pytest.raises(ValueError, match="nodes: there are none"):
        judge(trainer, [])
    three = make(agents=[trainer.agents[0].model, trainer.agents[1].model, trainer.agents[0].model], reward_func=lambda a, b, c: letters(a, b))
    with pytest.raises(ValueError, match=r"2 agents.*\[3\]"):
        judge(trainer, [three.rollout(rows(1)[0])])


# ---- choosing and summing

def test_experiences_are_chosen_by_agent_and_turn():
    samples = [sample(1.0, 2.0), sample(3.0, 4.0, turn=1)]
    assert [one.signal for one in experiences_of(samples)] == [1, 2, 3, 4]
    assert [one.signal for one in experiences_of(samples, agent=1)] == [2, 4] and [one.signal for one in experiences_of(samples, turn=2)] == [3, 4]
    for wrong in (dict(agent=2), dict(turn=3), dict(turn=0)):
        with pytest.raises(ValueError, match=r"agent.*turn.*\(0, 1\).*\(1, 2\)"):
            experiences_of(samples, **wrong)
    with pytest.raises(ValueError, match="none"):
        experiences_of([])


@pytest.mark.parametrize("discount, expected", [(0.0, [1, 2, 4, 8]), (0.5, [3, 4, 4, 8]), (1.0, [7, 6, 4, 8])])
def test_realised_returns_are_discounted_along_each_episode(discount, expected):
    samples = [sample(1.0), sample(2.0, turn=1), sample(4.0, turn=2), sample(8.0, item=1)]
    assert realised_returns(samples, discount) == [[number] for number in expected]


def test_realised_returns_belong_to_each_agent():
    assert realised_returns([sample(1.0, 2.0), sample(3.0, 5.0, turn=1)], 1.0) == [[4, 7], [3, 5]]


def test_realised_returns_are_those_of_the_rollouts():
    trainer = make(**TWO_TURNS, discount=0.5)
    nodes = [trainer.rollout(row) for row in rows(3)]
    returns = realised_returns(judge(trainer, nodes), discount=0.5)
    for place, node in enumerate(nodes):
        first, second = node.joints[0].rewards[0], node.children[0].joints[0].rewards[0]
        assert returns[2 * place] == pytest.approx([first + 0.5 * second] * 2) and returns[2 * place + 1] == pytest.approx([second] * 2)


@pytest.mark.parametrize("samples", [
    [sample(2.0, turn=1), sample(1.0)], [sample(1.0), sample(2.0, turn=2)], [sample(1.0), sample(2.0, turn=1, item=1)], [sample(1.0), replace(sample(2.0, turn=1), sample=1)],
], ids=["backwards", "a turn is missing", "another item", "another sample"])
def test_turns_that_do_not_follow_one_another(samples):
    with pytest.raises(ValueError, match="samples"):
        realised_returns(samples, 0.5)


# ---- calibration

def test_bins_by_hand():
    assert calibration([0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 2.0, 1.0], bins=2) == [Bin(0.0, 1.0, 1.0, 2), Bin(1.0, 1.0, 0.0, 2)]


def test_every_prediction_is_in_one_bin_of_about_equal_size():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(100, generator=generator).tolist()
    returns = torch.randn(100, generator=generator).tolist()
    bins = calibration(values, returns, bins=7)
    assert len(bins) == 7 and sum(one.count for one in bins) == 100 and max(one.count for one in bins) - min(one.count for one in bins) <= 2
    assert [one.value for one in bins] == sorted(one.value for one in bins)
    assert sum(one.value * one.count for one in bins) == pytest.approx(sum(values)) and sum(one.ret * one.count for one in bins) == pytest.approx(sum(returns))


def test_equal_values_stay_together():
    assert [one.count for one in calibration([0.0] * 9 + [1.0], [0.0] * 10, bins=5)] == [9, 1]
    alone, = calibration([3.0], [1.0])
    assert (alone.value, alone.ret, alone.count) == (3, 1, 1) and alone.error != alone.error


@pytest.mark.parametrize("values, returns, bins, said", [([], [], 4, "at least one"), ([1.0], [], 4, "1 and 0"), ([1.0], [1.0], 0, "bins")])
def test_bins_of_nothing(values, returns, bins, said):
    with pytest.raises(ValueError, match=said):
        calibration(values, returns, bins)


def test_the_calibration_plot_shows_the_bins_of_one_agent_and_turn():
    samples = [one for item in range(4) for one in (sample(0.0, 1.0, values=(item, 9), item=item), sample(item, 1.0, turn=1, values=(5, 9), item=item))]
    ax = plot_calibration(samples, discount=1.0, agent=0, turn=1, bins=4)
    x, y = ax.containers[0].lines[0].get_data()
    assert list(x) == list(y) == [0, 1, 2, 3] and [text.get_text() for text in ax.texts] == ["1"] * 4
    ours = plt.subplots()[1]
    assert plot_calibration(samples, discount=0.0, ax=ours) is ours
    with pytest.raises(ValueError, match="agent 5"):
        plot_calibration(samples, 1.0, agent=5)


# ---- plots

def td_history(agents=2, turns=2, updates=3):
    history = History()
    for update in range(updates):
        for turn in range(turns):  # an update is of one turn
            numbers = {"mean": update, "q05": update - 2, "q25": update - 1, "q75": update + 1, "q95": update + 2}
            history.add("train", update, 8 * update + turn, {f"agent_{agent}/turn_{turn + 1}/td_error_{name}": float(value) for agent in range(agents) for name, value in numbers.items()})
    return history


@pytest.mark.parametrize("agents, turns", [(1, 1), (2, 2), (3, 1)])
def test_a_panel_per_agent_and_turn(agents, turns):
    axes = plot_td_errors(td_history(agents, turns))
    assert axes.shape == (agents, turns)
    line = axes[-1, -1].lines[0]
    assert line.get_xdata().tolist() == [turns - 1, 8 + turns - 1, 16 + turns - 1] and line.get_ydata().tolist() == [0, 1, 2]
    assert axes[-1, -1].get_title() == f"agent {agents - 1}, turn {turns}"


def test_panels_of_a_real_run():
    assert plot_td_errors(trained(**KINDS["heads-V"], **TWO_TURNS).history).shape == (2, 2)


@pytest.mark.parametrize("history", [History(), [{"kind": "train", "loss": 1.0}]], ids=["empty", "without critics"])
def test_a_history_without_td_errors(history):
    with pytest.raises(ValueError, match="history.*td_error_mean.*MAAC and IAC"):
        plot_td_errors(history)


def test_two_critics_on_the_same_rollouts():
    shared, own = [sample(1.0, 1.0, values=(0.5, 0.5))], [sample(1.0, 1.0, values=(0.0, 2.0))]
    ax = plot_shared_and_own(shared, own)
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines[:2]] == [(0.5, 1.0), (0.5, -1.0)]
    with pytest.raises(ValueError, match="different rollouts"):
        plot_shared_and_own(shared, [JointSample({}, 0, 0, (experience(0, text="b"), experience(1)))])
    with pytest.raises(ValueError, match="turn 2"):
        plot_shared_and_own(shared, own, turn=2)
    with pytest.raises(ValueError, match="none"):
        plot_shared_and_own([], [])


def test_advantages_are_counted_per_agent_as_they_are_given():
    samples = [sample(float(number), 0.0, item=number) for number in range(4)]
    bars = plot_advantages(samples, bins=4).containers
    assert [[bar.get_height() for bar in own] for own in bars] == [[1, 1, 1, 1], [4, 0, 0, 0]]
    scores = plot_advantages(normalized(samples), bins=4)
    assert sum(bar.get_height() for bar in scores.containers[0]) == 4
    with pytest.raises(ValueError, match="none"):
        plot_advantages([])


# ---- gradients

@pytest.mark.parametrize("kind", ["MAAC-V", "heads-V"])
def test_products_of_scores_are_those_of_autograd(kind):
    trainer = make(**KINDS[kind], num_generations=3)
    samples = judge(trainer, [trainer.rollout(rows(1)[0])])
    products = score_products(trainer, samples, agent=1)
    actor = trainer.team.actors[1].model
    scores = []
    for one in experiences_of(samples, agent=1):
        total = completion_logprobs_naive(actor, [one.prompt.token_ids], [one.completion.token_ids], [0]).sums()[0]
        scores.append(torch.cat([grad.flatten() for grad in torch.autograd.grad(total, list(actor.parameters()), materialize_grads=True)]))
    wanted = torch.stack(scores).double()
    assert products.shape == (3, 3) and torch.allclose(products, wanted @ wanted.T, rtol=1e-3, atol=1e-4)
    assert all(parameter.grad is None for parameter in actor.parameters())


def test_noise_is_the_variance_of_the_samples_gradients():
    generator = torch.Generator().manual_seed(1)
    scores, advantages = torch.randn(9, 5, generator=generator, dtype=torch.float64), torch.randn(9, generator=generator, dtype=torch.float64)
    noise = gradient_noise(scores @ scores.T, advantages)
    gradients = advantages[:, None] * scores
    variance = gradients.var(0).sum().item()
    assert noise.variance == pytest.approx(variance) and noise.signal == pytest.approx((gradients.mean(0) ** 2).sum().item() - variance / 9)
    assert gradient_noise((scores @ scores.T).float(), advantages.tolist()).variance == pytest.approx(variance, rel=1e-5)


def test_the_signal_has_no_bias():
    values, chance = [0.0, 1.0, 3.0], 1 / 3  # a score of 1, three equally likely advantages: the true gradient is 4/3
    mean = sum(chance**2 * gradient_noise(torch.ones(2, 2), [a, b]).signal for a in values for b in values)
    assert mean == pytest.approx((4 / 3) ** 2)


def test_equal_gradients_have_no_noise():
    assert gradient_noise(torch.ones(3, 3), [2.0, 2.0, 2.0]) == GradientNoise(0.0, 4.0)


@pytest.mark.parametrize("products, advantages", [(torch.eye(2), [1.0]), (torch.eye(1), [1.0]), (torch.eye(2), [1.0, 2.0, 3.0])])
def test_advantages_of_other_samples(products, advantages):
    with pytest.raises(ValueError, match="at least 2"):
        gradient_noise(products, advantages)


def test_the_interval_holds_the_figure_and_is_the_same_every_time():
    scores = torch.randn(40, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    products, advantages = scores @ scores.T, [1.0, -1.0] * 20
    low, high = noise_interval(products, advantages)
    assert low < gradient_noise(products, advantages).variance ** 0.5 < high and noise_interval(products, advantages) == (low, high)


def test_a_bar_per_critic():
    ax = plot_gradient_noise(torch.eye(2), {"none": [1.0, -1.0], "perfect": [0.0, 0.0]})
    assert [bar.get_width() for bar in ax.patches] == [1, 0] and [label.get_text() for label in ax.get_yticklabels()] == ["none  1", "perfect  0"]


def test_matplotlib_is_asked_for_by_plots_only():
    code = "import sys, comlrl_nb.diagnostics; assert 'matplotlib' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_tutorials_table_names_tests_cases_and_pages_that_exist():
    root = Path(__file__).parent.parent
    page = root / "nbs" / "tutorials" / "20_actor_critic.ipynb"
    text = "\n".join("".join(cell["source"]) for cell in json.loads(page.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "markdown")
    files = [root / "tests" / name for name in ("test_actor_critic.py", "test_bad_input_actor_critic.py")]
    tests = "\n".join(file.read_text(encoding="utf-8") for file in files)
    rows = [line for line in text.splitlines() if "| ✓ |" in line]
    names = {name for row in rows for name in re.findall(r"`(test_\w+)`", row)}
    cases = {case for row in rows for case in re.findall(r'"([^"]+)"', row)}
    links = set(re.findall(r"\]\(([\w./]+\.ipynb)\)", text))
    assert len(rows) > 50 and len(names) > 40 and len(cases) > 20
    assert [name for name in names if f"def {name}(" not in tests] == []
    assert [case for case in cases if f'"{case}"' not in tests] == []
    assert [link for link in links if not (page.parent / link).exists()] == []


# ---- both sides of rounds

ROUNDS = {1: ([0.0, 1.0, 1.0, 1.0], [0.0, 0.0]), 2: ([], [0.5]), 4: ([1.0], [2.0])}  # a round without samples of one side; one that is missing; a reward out of range


def written(folder):
    for iteration, sides in ROUNDS.items():
        write_distribution(folder, iteration, BothRewards(*sides), [], (0.0, 1.0))
    return folder


@pytest.mark.parametrize("inner", ["", "reward_distributions"])
def test_distributions_of_both_sides_over_rounds(tmp_path, inner):
    written(tmp_path / inner)
    axes = plot_reward_distributions(tmp_path)
    ours, theirs = (ax.images[0].get_array() for ax in axes)
    assert ours.shape == theirs.shape == (16, 4)
    assert ours[:, 0].tolist() == [0.25, *[0] * 14, 0.75] and ours[:, 1].sum() == ours[:, 2].sum() == 0 and ours[-1, 3] == 1
    assert [theirs[0, 0], theirs[8, 1], theirs[15, 3]] == [1, 1, 1] and theirs.sum() == 3
    assert [(list(ax.lines[0].get_xdata()), list(ax.lines[0].get_ydata())) for ax in axes] == [([1, 4], [0.75, 1.0]), ([1, 2, 4], [0.0, 0.5, 2.0])]
    assert axes[0].images[0].get_extent() == [0.5, 4.5, 0.0, 1.0]


def test_a_folder_without_distributions_is_refused(tmp_path):
    (tmp_path / "iteration_0001.json").write_text(json.dumps({"iteration": 1, "num_pairs": 0, "pairs": []}))
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match="log_reward_distribution"):
            plot_reward_distributions(folder)


def test_means_of_both_sides_from_a_history():
    history = History()
    for iteration, sides in ROUNDS.items():
        history.add("iter", 0, 0, {f"iter/{name}": value for name, value in distribution_stats(iteration, BothRewards(*sides), []).items()})
    ax = plot_reward_means(history)
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines] == [([1, 4], [0.75, 1.0]), ([1, 2, 4], [0.0, 0.5, 2.0])]
    assert [len(line.get_xdata()) for line in plot_reward_means(history, "selected").lines] == [0, 0]
    with pytest.raises(ValueError, match="log_reward_distribution"):
        plot_reward_means(History())


@pytest.mark.parametrize("draw", [plot_reward_distributions, plot_reward_means])
def test_an_unknown_group_is_named(draw):
    with pytest.raises(ValueError, match="group='all': .*candidate.*selected"):
        draw(History(), "all")

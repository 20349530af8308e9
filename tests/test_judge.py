"""A model as judge: what counts as a verdict, both orders, and the places where its labels are used."""
import pytest

from comlrl_nb.generation import Sampling
from comlrl_nb.judge import Comparison, Judge, LocalModel, label_in, meetings, read_verdict, shares, which_is_better
from comlrl_nb.remote_formats import Answer, Chat, Request
from comlrl_nb.streams import RandomStream
from comlrl_nb.toy import micro_model, micro_tokenizer
import iterative_runs
from madpo_runs import make, weights, same
from remote_servers import chat, serving

FIRST, SECOND = ("the boat", "the boat"), ("the boat", "the tram")


class Scripted:
    """Answers with what `speak(question)` says, and remembers the questions."""

    def __init__(self, speak):
        self.speak, self.asked = speak, []

    def answers(self, requests):
        self.asked += [request.prompt for request in requests]
        return [[Answer(said) if (said := self.speak(request.prompt)) else Answer(None, False, "empty")] for request in requests]


def comparison(first=FIRST, second=SECOND):
    return Comparison(("carry?", "leave?"), first, second, {"place": "harbour"})


def longer(question):
    """Prefers the team that wrote more, whatever its place."""
    lengths = [len(part) for part in question.split("\n\nAnswer with")[0].split("\n\nTeam ")[1:]]
    return "tie" if lengths[0] == lengths[1] else "AB"[lengths[1] > lengths[0]]


@pytest.mark.parametrize("text, verdict", [  # C52
    ("", None), (None, None), ("   ", None), ("maybe", None), ("A or B", None), ("A/B", None), ("A and B", None), ("both", None), ("neither", None),
    ("A", "first"), ("a", "first"), (" a.\n", "first"), ("**B**", "second"), ("(b)", "second"), ("\"A\"", "first"), ("1", "first"), ("first", "first"),
    ("2", "second"), ("The second one", "second"), ("Team B", "second"), ("Response 1", "first"), ("Team A wins!", "first"), ("B is better.", "second"),
    ("tie", "tie"), ("It's a tie.", "tie"), ("A tie", "tie"), ("Draw", "tie"), ("equally good", "tie"),
    ("Team A is worse", None), ("Team A is not better", None), ("I like A", None), ("A boat takes it", None), ("3", None), ("C", None), ("AB", None),
    ("Answer: A", "first"), ("Final verdict: B", "second"), ("The winner is team A.", "first"), ("My choice is: tie", "tie"),
    ("[[A]]", "first"), ("I think [[B]] because of A.", "second"), ("[[A]] [[B]]", None), ("[[C]]", None),
    ("Some reasons about B.\n\nA", "first"), ("B\nbecause A is slow", "second"), ("A\nB", None), ("Verdict: A\nVerdict: B", None),
    ("Team A\nslow\n\nTeam B\nfast", None), ("First, the boat.\nSecond, the tram.", None), ("1\n2", None),
    ('{"verdict": "A"}', "first"), ('```json\n{"winner": "team b", "why": "A is slow"}\n```', "second"), ('{"verdict": "A", "winner": "B"}', None),
    ('{"verdict": "A"', None), ('{"reason": "B is', None), ('{"verdict": 1}', "first"), ('{"verdict": null}', None), ('{"verdict": ["A"]}', "first"),
    ('{"score": "A"}', None), ("{}", None), ("{A}", None),
    ("<think>B is better\nB</think>\nA", "first"), ("<think>B", None), ("so B</think>tie", "tie"), ("None", None),
])
def test_verdicts(text, verdict):
    assert read_verdict(text) == verdict


def test_the_first_is_never_the_winner_by_default():
    for said in ("A", "B", "first", "second", "1", "2", "", "x", "A or B"):
        assert Judge(Scripted(lambda question: said)).compare([comparison()])[0] in ("tie", None)


@pytest.mark.parametrize("said, label, counts", [
    ("A", "tie", {"questions": 2, "disagreement": 1}), ("B", "tie", {"questions": 2, "disagreement": 1}), ("tie", "tie", {"questions": 2, "tie": 1}),
    ("well", None, {"questions": 4, "unreadable": 1}), ("", None, {"questions": 4, "unreadable": 1, "no_answer": 4})])
def test_what_is_counted(said, label, counts):
    judge = Judge(Scripted(lambda question: said))
    assert judge.compare([comparison()]) == [label] and +judge.counts == counts


def test_one_order_that_cannot_be_read_gives_no_label():
    def speak(question):
        return "A" if question.index("tram") > question.index("Team B") else "hm"
    judge = Judge(Scripted(speak), retries=0)
    assert judge.compare([comparison()]) == [None] and judge.counts["unreadable"] == 1


def test_only_the_unreadable_is_asked_again():
    said = iter(["hm", "B", "A", "B", "A"])
    model = Scripted(lambda question: next(said))
    judge = Judge(model, retries=2)
    assert judge.compare([comparison(), comparison()]) == ["first", "first"]
    assert len(model.asked) == 5 and model.asked[4] == model.asked[0]


def test_a_fair_judge_does_not_see_the_order():
    judge = Judge(Scripted(longer))
    pairs = [comparison(("aaaa", "b"), ("a", "b")), comparison(("a", "b"), ("aaaa", "b")), comparison(("a", "b"), ("b", "a"))]
    assert judge.compare(pairs) == ["first", "second", "tie"] and +judge.counts == {"questions": 6, "first": 1, "second": 1, "tie": 1}


def test_the_question_shows_prompts_and_texts_of_all_and_may_be_replaced():
    asked = which_is_better(comparison())
    assert all(part in asked for part in ("carry?", "leave?", *FIRST, *SECOND))
    model = Scripted(lambda question: "tie")
    Judge(model, lambda it: f"{it.item['place']}: {it.first[1]} or {it.second[1]}?").compare([comparison()])
    assert model.asked == ["harbour: the boat or the tram?", "harbour: the tram or the boat?"]


def test_nothing_to_compare():
    judge = Judge(Scripted(longer))
    assert judge.compare([]) == [] and judge(["a"], ["b"], prompts=["p", "q"], batch_items=[{}]) == [0.5] and judge.relabel([]) == []


@pytest.mark.parametrize("options", [dict(retries=-1), dict(opponents=0)])
def test_options_are_checked(options):
    with pytest.raises(ValueError, match="retries must be at least 0 and opponents None or at least 1"):
        Judge(Scripted(longer), **options)


@pytest.mark.parametrize("num", [2, 3, 6, 7])
@pytest.mark.parametrize("opponents", [None, 1, 2, 3, 10])
def test_everyone_meets_others_once(num, opponents):
    games = meetings(num, opponents)
    assert len({frozenset(game) for game in games}) == len(games) and all(i != j for i, j in games)
    met = [sum(k in game for game in games) for k in range(num)]
    assert len(set(met)) == 1 and met[0] == min(num - 1, 2 * (opponents or num))


def test_shares_do_not_count_what_has_no_label():
    assert shares(3, [(0, 1), (0, 2), (1, 2)], ["first", None, "second"]) == [1.0, 0.0, 1.0]
    assert shares(2, [(0, 1)], [None]) == [0.5, 0.5]


@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_a_trainer_takes_the_judge_as_its_reward(num_agents):
    from comlrl_nb.utils.reward_utils import RewardFunction
    reward = RewardFunction(Judge(Scripted(longer)), num_agents, columns=["prompt"])
    joints = [("aaa",) * num_agents, ("a",) * num_agents, ("aa",) * num_agents]
    assert [each.rewards[0] for each in reward.score(["p"] * num_agents, joints, {"prompt": "p"})] == [1.0, 0.0, 0.5]


def test_training_with_a_judge():
    model = Scripted(longer)
    trainer = make(reward_func=Judge(model), pair_selection="all", preference_pairs_per_sample=None)
    before = weights(trainer)
    pairs = trainer.collect()
    assert pairs and all(sum(len(c.text) for c in pair.winner) >= sum(len(c.text) for c in pair.loser) for pair in pairs)
    trainer.train_on(pairs)
    assert not same(before, weights(trainer)) and len(model.asked) == 3 * 6 * 2


def test_a_judge_that_gives_no_label_trains_nothing():
    trainer = make(reward_func=Judge(Scripted(lambda question: "who knows")))
    before = weights(trainer)
    trainer.train()
    assert same(before, weights(trainer))


def test_collected_pairs_are_labelled_anew():
    trainer = make()
    pairs = trainer.collect()
    turned = Judge(Scripted(lambda question: "BA"[longer(question) == "B"] if longer(question) != "tie" else "tie")).relabel(pairs)
    assert turned and all(sum(len(c.text) for c in pair.winner) < sum(len(c.text) for c in pair.loser) for pair in turned)
    sides = [{(pair.winner, pair.winner_reward), (pair.loser, pair.loser_reward)} for pair in pairs]
    assert all({(pair.winner, pair.winner_reward), (pair.loser, pair.loser_reward)} in sides for pair in turned)
    trainer.train_on(turned)


def test_relabelling_exchanges_the_raw_rewards():
    from dataclasses import replace
    pair = replace(make().collect()[0], raw_rewards=(3.0, 1.0), target_raw_reward=1.0, comparator_raw_reward=3.0)
    swap = Judge(Scripted(lambda question: "BA"[question.index(pair.winner[0].text) > question.index(pair.loser[0].text)]))
    pair = replace(pair, winner=tuple(replace(c, text=f"win{i}") for i, c in enumerate(pair.winner)),
                   loser=tuple(replace(c, text=f"lose{i}") for i, c in enumerate(pair.loser)))
    turned, = swap.relabel([pair])
    assert (turned.raw_rewards, turned.target_raw_reward, turned.comparator_raw_reward) == ((1.0, 3.0), 1.0, 3.0)
    assert (turned.winner_reward, turned.loser_reward) == (pair.loser_reward, pair.winner_reward)


def test_a_remote_judge():
    pytest.importorskip("httpx")
    pytest.importorskip("tenacity")
    from comlrl_nb.remote import RemoteModel

    def script(seen):
        return chat(longer(seen.body["messages"][0]["content"]))
    with serving(script) as server:
        judge = Judge(RemoteModel(server.url, Chat(model="judge", max_new_tokens=4, temperature=0.0)))
        assert judge.compare([comparison(("aaaa", "b"), ("a", "b")), comparison(FIRST, FIRST)]) == ["first", "tie"]
    assert len(server.seen) == 4 and server.seen[0].body["temperature"] == 0.0


# ---- a local model

def test_a_local_model_answers_in_order_and_leaves_random_numbers_alone():
    import torch
    local = LocalModel(micro_model(), micro_tokenizer(), Sampling(max_new_tokens=5), seed=3)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    found = local.answers([Request("ab", 0, 2, {}), Request("the", 0, 1, {}), Request("ok?", 1, 2, {}), Request("ok?", 1, 0, {})])
    assert [len(answers) for answers in found] == [2, 1, 2, 0] and torch.equal(before, torch.get_rng_state())
    again = LocalModel(micro_model(), micro_tokenizer(), Sampling(max_new_tokens=5), seed=3)
    assert again.answers([Request("ab", 0, 2, {}), Request("the", 0, 1, {}), Request("ok?", 1, 2, {}), Request("ok?", 1, 0, {})]) == found
    assert isinstance(local.stream, RandomStream)


def test_a_question_is_rendered_with_the_chat_template():
    tokenizer = micro_tokenizer()
    seen = []
    model = micro_model()
    generate = model.generate
    model.generate = lambda **kw: seen.append(kw["input_ids"][0].tolist()) or generate(**kw)
    LocalModel(model, tokenizer, Sampling(max_new_tokens=2)).answers([Request("ab", 0, 1, {})])
    assert seen == [tokenizer("ab ")["input_ids"]]
    tokenizer.chat_template = None
    LocalModel(model, tokenizer, Sampling(max_new_tokens=2)).answers([Request("ab", 0, 1, {})])
    assert seen[1] == tokenizer("ab")["input_ids"]


def test_labels():
    assert label_in("The first response is better") == label_in("'A'") == "first" and label_in("winner") is None


@pytest.mark.parametrize("kind", ["MADPO", "MARLHF"])
def test_rounds_with_a_judge(kind, tmp_path, monkeypatch):
    """Both sides of a round, of different sizes, meet before the judge; its labels are what is stored and learned from."""
    monkeypatch.chdir(tmp_path)
    model = Scripted(longer)
    trainer = iterative_runs.make(kind, reward_func=Judge(model), preference_num_candidates=4, comparator_num_candidates=3, preference_pairs_per_sample=None, pair_selection="all")
    before = weights(trainer)
    trainer.train()
    pairs = [pair for content in iterative_runs.stored(trainer) for pair in content["pairs"]]
    written = lambda pair, side: sum(map(len, pair[f"{side}_completions"]))
    assert pairs and model.asked and all(written(pair, "winner") > written(pair, "loser") for pair in pairs)
    ours = {pair["target_raw_reward"] == pair["winner_reward"] for pair in pairs}
    assert ours == {True, False}, "either side wins somewhere"
    assert not same(before, weights(trainer))

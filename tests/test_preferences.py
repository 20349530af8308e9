"""Pairs and their records."""
import json
import random

import pytest

from comlrl_nb.preferences import from_record, pairs_of, to_record
from comlrl_nb.types import Completion, Generation, JointResponse, Node, PreferencePair, Prompt


def completion(text, finished=True):
    return Completion(text, (*text.encode(), 2) if finished else tuple(text.encode()), finished)


def node(texts, scores):
    candidates = tuple(map(completion, texts))
    joints = tuple(JointResponse((k, k), (c, c), (c.text, c.text), (s,), (s,)) for k, (c, s) in enumerate(zip(candidates, scores)))
    prompt = Prompt("read", (1, 7))
    return Node({}, 0, (Generation(0, prompt, candidates), Generation(1, prompt, candidates)), joints)


SEED_KEYS = {"prompts", "winner_completions", "loser_completions", "winner_reward", "loser_reward", "candidate_reward_mean"}
ITERATIVE_KEYS = {"raw_rewards", "target_raw_reward", "comparator_raw_reward"}


@pytest.mark.parametrize("raw", [None, (2.0, 1.0)])
def test_a_record_survives_json(raw):
    more = {} if raw is None else dict(raw_rewards=raw, target_raw_reward=2.0, comparator_raw_reward=1.0)
    pair = PreferencePair((Prompt("a é 🙂", (1, 5)), Prompt("b", (1, 6))), (completion("x"), completion("y", finished=False)),
                          (completion(""), completion("z")), 0.92, 0.41, 0.63, **more)
    record = to_record(pair)
    assert from_record(json.loads(json.dumps(record))) == pair
    assert SEED_KEYS <= record.keys() and (ITERATIVE_KEYS <= record.keys()) == (raw is not None)
    assert all(len(record[key]) == 2 for key in ("prompts", "winner_completions", "loser_completions"))


def test_a_record_without_its_keys_is_refused():
    record = to_record(pairs_of(node(["a", "b"], [1.0, 0.0]), "all", None, random.Random(0))[0][0])
    for key in ("prompts", "winner_reward", "winner_tokens"):
        with pytest.raises(ValueError, match=key):
            from_record({name: value for name, value in record.items() if name != key})
    assert from_record(record | {"note": "extra keys are allowed"}).winner_reward == 1.0


def test_counts_of_what_was_left_out():
    pairs, counts = pairs_of(node(["a", "a", "b", "c"], [1.0, 0.0, 0.0, 0.5]), "all", None, random.Random(0))
    assert counts == {"pairs": 4, "tied_pairs": 1, "identical_pairs": 1}
    assert all(pair.winner_reward > pair.loser_reward and not pair.same_tokens for pair in pairs)


def test_the_limit_is_not_spent_on_identical_pairs():
    pairs, _ = pairs_of(node(["a", "a", "b"], [9.0, 0.0, 8.0]), "reward_gap", 1, random.Random(0))
    assert [(pair.winner[0].text, pair.loser[0].text) for pair in pairs] == [("b", "a")]

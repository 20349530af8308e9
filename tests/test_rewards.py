"""What reward functions receive, what they may return (C33, C36), and how errors surface."""
import functools
import inspect
import json
import math
import signal
import threading
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import comlrl_nb.utils
from comlrl_nb.utils.reward_utils import (
    RewardFunction, batched_reward, bind_reward, call_reward_function, normalize_reward_lengths, resolve_reward_range, set_reward_range,
)

PROMPTS, TEXTS, ITEM = ["p1", "p2"], [("a0", "b0"), ("a1", "b1")], {"prompt": "p", "answer": "x"}
ALL = [["a0"], ["b0"]]


class Seen:
    """Records its arguments and pays 1."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return 1.0


def received(source, num_agents=2, columns=("prompt", "answer"), prompts=PROMPTS, texts=TEXTS):
    """Build `def f(<source>)` that returns its local variables; what does the first sample's call get?"""
    got = []
    namespace = {"got": got}
    exec(f"def f({source}):\n    got.append(dict(locals()))\n    return 1.0", namespace)
    RewardFunction(namespace["f"], num_agents, columns).score(prompts, texts, ITEM)
    assert len(got) == len(texts)  # one call per joint sample
    return got[0]


FITS = [  # parameters, what the first sample's call gets
    ("x, y", dict(x=["a0"], y=["b0"])),
    ("x, y, /", dict(x=["a0"], y=["b0"])),
    ("p, x, y", dict(p=PROMPTS, x=["a0"], y=["b0"])),
    ("both", dict(both=ALL)),
    ("*texts", dict(texts=(["a0"], ["b0"]))),
    ("first, *rest", dict(first=["a0"], rest=(["b0"],))),
    ("x, y, *rest", dict(x=["a0"], y=["b0"], rest=())),
    ("p, x, y, *rest", dict(p=PROMPTS, x=["a0"], y=["b0"], rest=())),
    ("scale=2.0, *texts", dict(scale=2.0, texts=(["a0"], ["b0"]))),
    ("prompts, x, y", dict(prompts=PROMPTS, x=["a0"], y=["b0"])),
    ("x, y, prompts", dict(prompts=PROMPTS, x=["a0"], y=["b0"])),
    ("prompts, both", dict(prompts=PROMPTS, both=ALL)),
    ("prompts, /, x, y", dict(prompts=PROMPTS, x=["a0"], y=["b0"])),
    ("x, y, batch_items", dict(x=["a0"], y=["b0"], batch_items=[ITEM])),
    ("x, y, batch_items=None", dict(x=["a0"], y=["b0"], batch_items=[ITEM])),
    ("x, y, *, prompts, batch_items", dict(x=["a0"], y=["b0"], prompts=PROMPTS, batch_items=[ITEM])),
    ("x, y, answer", dict(x=["a0"], y=["b0"], answer=["x"])),
    ("answer, both", dict(answer=["x"], both=ALL)),
    ("x, answer, y", dict(x=["a0"], y=["b0"], answer=["x"])),
    ("x, y, weight=3.0", dict(x=["a0"], y=["b0"], weight=3.0)),
    ("x, y, weight=3.0, answer=None", dict(x=["a0"], y=["b0"], weight=3.0, answer=["x"])),
    ("x, y, weight=3.0, answer=None, /", dict(x=["a0"], y=["b0"], weight=3.0, answer=["x"])),
    ("x, y, *, weight=3.0", dict(x=["a0"], y=["b0"], weight=3.0)),
    ("x, y, **rest", dict(x=["a0"], y=["b0"], rest=dict(prompts=PROMPTS, batch_items=[ITEM]))),
    ("x, y, prompts, **rest", dict(x=["a0"], y=["b0"], prompts=PROMPTS, rest=dict(batch_items=[ITEM]))),
    ("*texts, **rest", dict(texts=(["a0"], ["b0"]), rest=dict(prompts=PROMPTS, batch_items=[ITEM]))),
    ("*texts, answer", dict(texts=(["a0"], ["b0"]), answer=["x"])),
]


@pytest.mark.parametrize("source, expected", FITS, ids=[source for source, _ in FITS])
def test_what_two_agents_functions_receive(source, expected):
    assert received(source) == expected


@pytest.mark.parametrize("source, expected", [
    ("x", dict(x=["a0"])), ("p, x", dict(p=["p1"], x=["a0"])), ("*texts", dict(texts=(["a0"],))), ("prompts, x", dict(prompts=["p1"], x=["a0"])),
])
def test_what_a_single_agents_functions_receive(source, expected):
    assert received(source, num_agents=1, prompts=["p1"], texts=[("a0",)]) == expected


def test_a_column_is_only_a_column_when_the_dataset_has_it():
    assert received("answer, x, y", columns=()) == dict(answer=PROMPTS, x=["a0"], y=["b0"])


MISFITS = ["", "x, y, z, w", "x, y, *, judge", "x=1, y=2", "prompts, batch_items", "**rest", "x, y, z, w, *rest", "prompt, answer"]


@pytest.mark.parametrize("source", MISFITS, ids=[source or "nothing" for source in MISFITS])
def test_impossible_signatures_are_refused_at_construction(source):
    namespace = {}
    exec(f"def judge_pair({source}): return 1.0", namespace)
    with pytest.raises(ValueError, match=r"reward_func judge_pair\(.*cannot take the texts of 2 agents.*expected 2 positional .*3 .*1 .*\*args"):
        RewardFunction(namespace["judge_pair"], 2, columns=["prompt", "answer"])


async def later(a, b):
    return 1.0


@pytest.mark.parametrize("func", [None, 3, "f", [len], later])
def test_what_is_no_function_is_refused(func):
    with pytest.raises(ValueError, match="reward_func must be one plain callable"):
        RewardFunction(func, 2)


class Judge:
    factor = 2.0

    def method(self, a, b, answer):
        return self.factor * (a[0] + b[0] == answer[0])

    @staticmethod
    def static(a, b):
        return 3.0

    def __call__(self, a, b):
        return 4.0


KINDS = [
    ("lambda", lambda a, b: 1.0, 1.0),
    ("partial with keyword", functools.partial(lambda a, b, weight: weight, weight=5.0), 5.0),
    ("partial with position", functools.partial(lambda weight, a, b: weight, 6.0), 6.0),
    ("bound method", Judge().method, 0.0),
    ("static method", Judge.static, 3.0),
    ("callable object", Judge(), 4.0),
    ("mock", mock.Mock(return_value=7.0), 7.0),
]


@pytest.mark.parametrize("func, value", [kind[1:] for kind in KINDS], ids=[kind[0] for kind in KINDS])
def test_kinds_of_callables(func, value):
    assert RewardFunction(func, 2, ["answer"]).score(PROMPTS, TEXTS[:1], ITEM)[0].rewards == (value,)


def test_a_builtin_without_signature_gets_one_list_per_agent():
    with pytest.raises(ValueError):
        inspect.signature(max)
    assert RewardFunction(max, 2).binding.call(max, mock.Mock(texts=[["a"], ["b"]])) == ["b"]


# return values

FORMS = {
    "int": 2, "float": 2.0, "bool": True, "numpy bool": np.True_, "Decimal": Decimal("2"), "Fraction": Fraction(4, 2),
    "list": [2.0], "tuple": (2.0,), "nested": [[2.0]], "float32": np.float32(2), "int array": np.array([2]), "array 0-d": np.array(2.0),
    "array (1,1)": np.array([[2.0]]), "tensor": torch.tensor(2.0), "tensor64 with grad": torch.tensor([2.0], dtype=torch.float64, requires_grad=True),
    "bfloat16": torch.tensor(2.0, dtype=torch.bfloat16), "int tensor": torch.tensor([[2]]), "list of tensors": [torch.tensor(2.0)],
    "list of numpy": [np.float64(2.0)],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form_of_one_value(form):
    reward, = RewardFunction(lambda a, b: form, 2).score(PROMPTS, TEXTS[:1], ITEM)
    expected = 1.0 if isinstance(form, (bool, np.bool_)) else 2.0
    assert reward == ((expected,), (expected,)) and type(reward.rewards[0]) is float


BAD = {
    "None": None, "nan": math.nan, "inf": -math.inf, "nan tensor": torch.tensor(math.nan), "Decimal nan": Decimal("nan"), "str": "1.0",
    "bytes": b"1", "dict": {"reward": 1.0}, "set": {1.0}, "generator": "GENERATOR", "complex": 1j, "object": object(), "list of None": [None],
    "list of str": ["1"], "dict in list": [{"a": 1}],
}


@pytest.mark.parametrize("name", BAD)
def test_a_value_that_is_no_finite_number_names_its_place(name):
    def judge(a, b):
        bad = (x for x in [1.0]) if name == "generator" else BAD[name]
        return bad if a == ["a1"] else 1.0

    with pytest.raises(ValueError, match="reward_func judge, item 5, sample 1: expected a finite number, got "):
        RewardFunction(judge, 2).score(PROMPTS, TEXTS, ITEM, item_index=5)


@pytest.mark.parametrize("raw, count", [([], 0), ([1.0, 2.0], 2), (np.ones((3, 1)), 3), (torch.ones(2), 2), ((1, 2, 3), 3), ("", 1)])
def test_wrong_counts_are_refused(raw, count):
    with pytest.raises(ValueError, match=f"got {count}: |got ''") as caught:
        RewardFunction(lambda a, b: raw, 2).score(PROMPTS, TEXTS, ITEM)
    assert "reward_func <lambda>, sample 0: expected 1 value for" in str(caught.value) or raw == ""


def test_actor_critic_functions_pay_the_team_or_each_agent():
    shared = RewardFunction(lambda a, b: 3.0, 2, per_agent=True).score(PROMPTS, TEXTS, ITEM)
    each = RewardFunction(lambda a, b: torch.tensor([1.0, 2.0]), 2, per_agent=True).score(PROMPTS, TEXTS, ITEM)
    assert [r.rewards for r in shared] == [(3.0,)] * 2 and [r.rewards for r in each] == [(1.0, 2.0)] * 2
    with pytest.raises(ValueError, match=r"expected 1 value or 2 \(one per agent\) for a joint response, got 3"):
        RewardFunction(lambda a, b: [1, 2, 3], 2, per_agent=True).score(PROMPTS, TEXTS, ITEM)
    with pytest.raises(ValueError, match="sample 0, agent 1: expected a finite number, got nan"):
        RewardFunction(lambda a, b: [1, math.nan], 2, per_agent=True).score(PROMPTS, TEXTS, ITEM)


def test_processor_sees_each_value_and_the_raw_one_is_kept():
    seen = []
    reward = RewardFunction(lambda a, b: [1, 2], 2, processor=lambda r: seen.append(r) or torch.tensor([10 * r]), per_agent=True)
    assert reward.score(PROMPTS, TEXTS[:1], ITEM) == [((10.0, 20.0), (1.0, 2.0))] and seen == [1.0, 2.0]
    for bad in (None, math.inf, "x", [1, 2]):
        with pytest.raises(ValueError, match="reward_processor after reward_func <lambda>, sample 0: expected a finite number"):
            RewardFunction(lambda a, b: 1.0, 2, processor=lambda r: bad).score(PROMPTS, TEXTS, ITEM)
    with pytest.raises(ValueError, match="reward_processor must be None or a callable, got 2.0"):
        RewardFunction(lambda a, b: 1.0, 2, processor=2.0)


# calls

def test_errors_of_the_users_code_surface_unchanged_after_one_call():
    for error in (TypeError("judge() missing 1 required positional argument: 'x'"), ValueError("mine"), KeyError("k")):
        calls = []

        def judge(a, b):
            calls.append(a)
            raise error

        with pytest.raises(type(error)) as caught:
            RewardFunction(judge, 2).score(PROMPTS, TEXTS, ITEM)
        assert caught.value is error and len(calls) == 1


def test_called_once_per_joint_sample_in_order_on_the_callers_thread():
    calls = []

    def judge(a, b):
        calls.append((a, b, threading.current_thread()))
        return len(calls)

    scores = RewardFunction(judge, 2).score(PROMPTS, TEXTS, ITEM)
    here = threading.current_thread()
    assert calls == [(["a0"], ["b0"], here), (["a1"], ["b1"], here)] and [s.rewards for s in scores] == [(1.0,), (2.0,)]


def test_runs_under_an_alarm():
    def judge(a, b):
        signal.alarm(5)
        signal.alarm(0)
        return 1.0

    assert RewardFunction(judge, 2).score(PROMPTS, TEXTS, ITEM)


def test_lists_are_fresh_and_the_row_is_the_users_own():
    def judge(prompts, a, b, batch_items):
        assert batch_items[0] is ITEM
        for values in (prompts, a, b, batch_items):
            values.clear()
        return 1.0

    prompts, texts = list(PROMPTS), list(TEXTS)
    RewardFunction(judge, 2).score(prompts, texts, ITEM)
    assert prompts == PROMPTS and texts == TEXTS


def test_a_row_without_the_named_column():
    with pytest.raises(ValueError, match=r"parameter 'answer'.*has only \['prompt'\]"):
        RewardFunction(lambda a, b, answer: 1.0, 2, ["answer"]).score(PROMPTS, TEXTS, {"prompt": "p"})


def test_no_samples_no_call():
    seen = Seen()
    assert RewardFunction(seen, 2).score(PROMPTS, [], ITEM) == [] and seen.calls == []


# batched judges

def test_batched_function_is_called_once_per_node():
    calls = []

    @batched_reward
    def judge(prompts, a, b, batch_items, answer):
        calls.append((prompts, a, b, batch_items, answer))
        return np.arange(2.0)

    scores = RewardFunction(judge, 2, ["answer"]).score(PROMPTS, TEXTS, ITEM)
    assert calls == [(PROMPTS, ["a0", "a1"], ["b0", "b1"], [ITEM, ITEM], ["x", "x"])]
    assert [s.rewards for s in scores] == [(0.0,), (1.0,)]


class BatchedObject:
    @batched_reward
    def __call__(self, a, b):
        return [len(a)] * len(a)


@pytest.mark.parametrize("func", [BatchedObject(), BatchedObject().__call__, functools.partial(BatchedObject().__call__)], ids=["object", "method", "partial"])
def test_batched_marks_are_found_on_objects_methods_and_partials(func):
    assert RewardFunction(func, 2).batched
    assert [s.rewards for s in RewardFunction(func, 2).score(PROMPTS, TEXTS, ITEM)] == [(2.0,), (2.0,)]


def test_mocks_are_not_batched():
    assert not RewardFunction(mock.Mock(return_value=1.0), 2).batched


@pytest.mark.parametrize("raw", [1.0, [1.0], [1.0, 2.0, 3.0], np.ones((2, 1)), [[1.0, 2.0], [3.0, 4.0]], None, {"a": 1}])
def test_batched_function_must_return_one_value_per_sample(raw):
    with pytest.raises(ValueError, match="reward_func <lambda>.*expected (2 values|a finite number)"):
        RewardFunction(batched_reward(lambda a, b: raw), 2).score(PROMPTS, TEXTS, ITEM)


def test_batched_actor_critic_function_may_return_a_row_per_agent():
    texts = [*TEXTS, ("a2", "b2")]
    rows = batched_reward(lambda a, b: torch.arange(6.0).reshape(2, 3))
    scores = RewardFunction(rows, 2, per_agent=True).score(PROMPTS, texts, ITEM)
    assert [s.rewards for s in scores] == [(0.0, 3.0), (1.0, 4.0), (2.0, 5.0)]
    one = RewardFunction(batched_reward(lambda a, b: [[1.0], [2.0]]), 2, per_agent=True).score(PROMPTS, texts[:1], ITEM)
    assert one[0].rewards == (1.0, 2.0)
    with pytest.raises(ValueError, match="expected 3 values .* or 2 rows of 3, got 6"):
        RewardFunction(batched_reward(lambda a, b: list(range(6))), 2, per_agent=True).score(PROMPTS, texts, ITEM)
    with pytest.raises(ValueError, match="sample 1, agent 1: expected a finite number"):
        RewardFunction(batched_reward(lambda a, b: [[1, 2, 3], [1, None, 3]]), 2, per_agent=True).score(PROMPTS, texts, ITEM)


# public helpers

def test_public_names_and_signatures():
    surface = json.loads((Path(__file__).parent / "data" / "api_surface.json").read_text())
    for name in ("call_reward_function", "normalize_reward_lengths", "resolve_reward_range", "set_reward_range", "RewardProcessors"):
        defined = surface[f"comlrl_nb.utils.{name}"]["defined_in"]
        public = getattr(comlrl_nb.utils, name)
        assert getattr(__import__(defined, fromlist=[name]), name) is public and name in comlrl_nb.utils.__all__
        if "sig" in surface[f"comlrl_nb.utils.{name}"]:
            assert [p for p in inspect.signature(public).parameters if f"{p}" not in surface[f"comlrl_nb.utils.{name}"]["sig"]] == []
    assert comlrl_nb.utils.batched_reward is batched_reward


def test_call_reward_function_passes_what_it_is_given():
    def judge(prompts, a, b, batch_items=None):
        return [len(prompts), len(a), len(b), len(batch_items or [])]

    completions = [["a0", "a1"], ["b0", "b1"]]
    assert call_reward_function(judge, PROMPTS, completions, num_agents=2) == [2.0, 2.0, 2.0, 0.0]
    assert call_reward_function(judge, PROMPTS, completions, num_agents=2, batch_items=[ITEM]) == [2.0, 2.0, 2.0, 1.0]
    signature = inspect.signature(lambda both: 0)
    assert call_reward_function(lambda both: len(both), PROMPTS, completions, num_agents=2, signature=signature) == [2.0]
    seen = Seen()
    call_reward_function(seen, PROMPTS, completions, num_agents=2)
    assert seen.calls == [((["a0", "a1"], ["b0", "b1"]), {"prompts": PROMPTS})]
    with pytest.raises(ValueError, match="value 1: expected a finite number"):
        call_reward_function(lambda a, b: [1.0, None], PROMPTS, completions, num_agents=2)


@pytest.mark.parametrize("rewards, agents, generations, expected", [
    ([1.0], 2, 4, [1.0, 1.0]), ([1.0, 2.0], 2, 4, [1.0, 2.0]), ([1, 2, 3, 4], 2, 4, [1.0, 2.0, 3.0, 4.0]), ([1, 2, 3], 1, 4, [1.0, 2.0, 3.0]), ([5], 1, 4, [5.0]),
])
def test_normalize_reward_lengths(rewards, agents, generations, expected):
    assert normalize_reward_lengths(rewards, num_agents=agents, num_generations=generations, algorithm="IAC") == expected


def test_normalize_reward_lengths_refuses_other_counts():
    with pytest.raises(ValueError, match=r"IAC: expected 1, 2 \(agents\) or 4 \(generations\) rewards, got 3"):
        normalize_reward_lengths([1, 2, 3], num_agents=2, num_generations=4, algorithm="IAC")
    with pytest.raises(ValueError, match="num_generations"):
        normalize_reward_lengths([1], num_agents=2, num_generations=0, algorithm="IAC")


def test_reward_range():
    def judge(a, b):
        return 1.0

    assert resolve_reward_range(judge) is None and set_reward_range(judge, -1, 1) is judge and resolve_reward_range(judge) == (-1.0, 1.0)
    for bad in ((1, 1), (2, 1), (0, math.inf), (math.nan, 1), ("a", 1)):
        with pytest.raises(ValueError, match="reward_range"):
            set_reward_range(judge, *bad)
    assert resolve_reward_range(judge) == (-1.0, 1.0)
    for bad in ("01", 3, (1,), (1, 2, 3)):
        judge.reward_range = bad
        with pytest.raises(ValueError, match="reward_range must be"):
            resolve_reward_range(judge)


def test_binding_can_be_read():
    binding = bind_reward(lambda p, a, b, **rest: 0, 2)
    assert [source.label for source in binding.named.values()] == ["the prompts", "texts of agent 0", "texts of agent 1"]
    assert "texts of agent 1" in RewardFunction(lambda a, b: 0, 2)._repr_markdown_()


@pytest.mark.gpu
def test_a_value_on_the_accelerator():
    assert RewardFunction(lambda a, b: torch.tensor([2.0], device="cuda", requires_grad=True), 2).score(PROMPTS, TEXTS[:1], ITEM)[0].rewards == (2.0,)

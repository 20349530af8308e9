"""Wrong calls of the iterative trainers: each names its field and what is allowed, before a model is loaded or a token sampled. Then wrong things later on."""
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel

from comlrl_nb.toy import micro_model
from comlrl_nb.trainers.configs import MADPOConfig, MAGRPOConfig
from comlrl_nb.trainers.preference import MADPOIterConfig, MARLHFIterConfig
from comlrl_nb.utils.reward_utils import set_reward_range
from iterative_runs import TOKENIZER, TRAINERS, config, joints, letters, make, rows, same, stored, team, weights

BOTH = pytest.mark.parametrize("kind", ["MADPO", "MARLHF"])


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model with its tokenizer, so that only what is wrong stands between a call and the loading."""
    path = tmp_path_factory.mktemp("model")
    micro_model().save_pretrained(path), TOKENIZER.save_pretrained(path)
    return str(path)


@pytest.fixture
def no_loading(monkeypatch):
    """Loading, building, moving or sampling from a model fails the test."""
    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded or sampled from")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for owner, name in ((AutoModelForCausalLM, "from_pretrained"), (AutoModelForCausalLM, "from_config"), (PreTrainedModel, "from_pretrained"), (GenerationMixin, "generate"),
                        (torch.nn.Module, "to"), (torch.nn.Module, "__deepcopy__")):
        monkeypatch.setattr(owner, name, refuse, raising=False)


class Later:
    """A value that is made inside the call."""

    def __init__(self, make):
        self.make = make


def fields(**wrong):
    """A config with wrong fields, built in the call."""
    return lambda kind: config(kind, **wrong)


def changed(**wrong):
    """A right config, some fields of which were overwritten afterwards."""
    def build(kind):
        args = config(kind)
        for name, value in wrong.items():
            setattr(args, name, value)
        return args
    return build


class NoParser:
    def build_prompt(self, batch_item, agent_prompts):
        return "prompt"


ONE = micro_model()
API = dict(comparator_policy="api", comparator_api_url="http://127.0.0.1:9/none")
HISTORY = dict(comparator_policy="history")
MODEL = dict(comparator_policy="model")
KEY = "sk-SECRET-0123456789"

WRONG = {
    # rounds and replay
    "no rounds": (fields(num_iterations=0), "num_iterations", "at least 1", "0"),
    "half a round": (fields(num_iterations=1.5), "num_iterations", "integer", "1.5"),
    "unknown replay mode": (fields(preference_replay_mode="newest"), "preference_replay_mode", "'lambda_decay'", "newest"),
    "k rounds without k": (fields(preference_replay_mode="nearest_k"), "preference_replay_k", "nearest_k", "None"),
    "no k": (fields(preference_replay_mode="nearest_k", preference_replay_k=0), "preference_replay_k", "at least 1", "0"),
    "k for the current round": (fields(preference_replay_k=2), "preference_replay_k", "None or 1", "2"),
    "k for all of history": (fields(preference_replay_mode="all_history", preference_replay_k=1), "preference_replay_k", "None", "all_history"),
    "k beside lambda": (fields(preference_replay_mode="lambda_decay", preference_replay_lambda=0.5, preference_replay_k=3), "preference_replay_k", "None", "lambda_decay"),
    "decay without lambda": (fields(preference_replay_mode="lambda_decay"), "preference_replay_lambda", "lambda_decay", "None"),
    "lambda above 1": (fields(preference_replay_mode="lambda_decay", preference_replay_lambda=1.01), "preference_replay_lambda", "at most 1", "1.01"),
    "negative lambda": (fields(preference_replay_mode="lambda_decay", preference_replay_lambda=-0.1), "preference_replay_lambda", "at least 0", "-0.1"),
    "lambda that is no number": (fields(preference_replay_mode="lambda_decay", preference_replay_lambda=float("nan")), "preference_replay_lambda", "finite", "nan"),
    "lambda for the current round": (fields(preference_replay_lambda=0.5), "preference_replay_lambda", "None", "current"),
    "lambda for k rounds": (fields(preference_replay_mode="nearest_k", preference_replay_k=2, preference_replay_lambda=1), "preference_replay_lambda", "None", "nearest_k"),
    "a sample of the current round": (fields(preference_replay_sample_size=10), "preference_replay_sample_size", "None", "current"),
    "an empty sample": (fields(preference_replay_mode="all_history", preference_replay_sample_size=0), "preference_replay_sample_size", "at least 1", "0"),
    "a replay folder that is a number": (fields(preference_replay_dir=3), "preference_replay_dir", "path", "3"),
    "an empty replay folder": (fields(preference_replay_dir=""), "preference_replay_dir", "path", "''"),
    "a checkpoint folder that is a number": (fields(policy_checkpoint_dir=3), "policy_checkpoint_dir", "path", "3"),
    "distributions in words": (fields(log_reward_distribution="yes"), "log_reward_distribution", "True or False", "yes"),
    "distributions without a range": (fields(log_reward_distribution=True), "log_reward_distribution", "reward_range", "set_reward_range"),
    "k overwritten": (changed(preference_replay_k=5), "preference_replay_k", "None or 1", "5"),
    # candidates and pairs
    "one candidate": (fields(preference_num_candidates=1), "preference_num_candidates", "at least 2", "1"),
    "no candidate of the comparator": (fields(comparator_num_candidates=0), "comparator_num_candidates", "at least 1", "0"),
    "all pairs, but four": (fields(pair_selection="all", preference_pairs_per_sample=4), "preference_pairs_per_sample", "None", "4"),
    "unknown selection": (fields(pair_selection="best"), "pair_selection", "'comparator_reward'", "best"),
    # the comparator
    "unknown policy": (fields(comparator_policy="yesterday"), "comparator_policy", "'history'", "yesterday"),
    "unknown generation mode": (fields(comparator_generation_mode="both"), "comparator_generation_mode", "'centralized'", "both"),
    "no model": (fields(**MODEL), "comparator_model_name", "comparator_agents", "None"),
    "a model for the current weights": (fields(comparator_model_name="some/model"), "comparator_model_name", "'model'", "some/model"),
    "models for history": (fields(comparator_agents=["a", "b"], **HISTORY), "comparator_agents", "None", "history"),
    "a model for the api": (fields(comparator_model_name="far", **API), "comparator_model_name", "comparator_api_model", "far"),
    "one model for two roles": (fields(comparator_agents=["a"], **MODEL), "comparator_agents", "2", "a"),
    "three models for one comparator": (fields(comparator_agents=["a"] * 3, comparator_generation_mode="centralized", **MODEL), "comparator_agents", "2", "a"),
    "models as text": (fields(comparator_agents="ab", **MODEL), "comparator_agents", "list", "ab"),
    "a model that is nothing": (fields(comparator_agents=[None, ONE], **MODEL), "comparator_agents[0]", "language model", "None"),
    "an empty name": (fields(comparator_agents=["", ""], **MODEL), "comparator_agents[0]", "identifier", "''"),
    "a name that does not exist": (fields(comparator_model_name="/no/such/folder", **MODEL), "/no/such/folder", "loaded", "folder"),
    "a second name that does not exist": (fields(comparator_agents=[ONE, "/no/such/folder"], **MODEL), "/no/such/folder", "loaded", "folder"),
    "no rounds back": (fields(comparator_history_k=0, **HISTORY), "comparator_history_k", "at least 1", "0"),
    "k for the comparator of now": (fields(comparator_history_k=1), "comparator_history_k", "'history'", "1"),
    "an index beyond the agents": (fields(comparator_generation_mode="centralized", comparator_centralized_agent_index=2), "comparator_centralized_agent_index", "below num_agents=2", "2"),
    "a negative index": (fields(comparator_centralized_agent_index=-1), "comparator_centralized_agent_index", "at least 0", "-1"),
    "a second central actor": (fields(collaboration_mode="centralized", comparator_centralized_agent_index=1), "comparator_centralized_agent_index", "0", "one actor"),
    "three devices": (fields(comparator_policy="copy", comparator_devices=["cpu"] * 3), "comparator_devices", "1 or 2", "cpu"),
    "a device that is not here": (fields(comparator_policy="copy", comparator_devices="cuda:63"), "comparator_devices", "cpu", "cuda:63"),
    "one of two that is not here": (fields(comparator_policy="history", comparator_devices=["cpu", "cuda:63"]), "comparator_devices[1]", "cpu", "cuda:63"),
    # the api
    "no address": (fields(comparator_policy="api"), "comparator_api_url", "'api'", "None"),
    "an address that is none": (fields(comparator_policy="api", comparator_api_url="localhost:1"), "comparator_api_url", "http", "not shown"),
    "an address with a password": (fields(comparator_policy="api", comparator_api_url=f"http://me:{KEY}@localhost/"), "comparator_api_url", "password", "not shown"),
    "unknown format": (fields(comparator_api_format="xml", **API), "comparator_api_format", "'generic'", "xml"),
    "a key that is not there": (fields(comparator_api_key_env="NO_SUCH_KEY_HERE", **API), "comparator_api_key_env", "not set", "NO_SUCH_KEY_HERE"),
    "a key with a line break": (fields(comparator_api_key=KEY + "\n", **API), "comparator_api_key", "line breaks", "not shown"),
    "headers as a list": (fields(comparator_api_headers=[KEY], **API), "comparator_api_headers", "mapping", "not shown"),
    "no time": (fields(comparator_api_timeout=0, **API), "comparator_api_timeout", "above 0", "0"),
    "no requests at once": (fields(comparator_api_max_concurrency=0, **API), "comparator_api_max_concurrency", "at least 1", "0"),
    # what all preference trainers share
    "two turns": (fields(num_turns=2), "num_turns", "1 in preference training", "2"),
    "crossed candidates": (fields(joint_mode="cross"), "joint_mode", "aligned", "cross"),
    "args is a dict": (lambda kind: {"num_agents": 2}, "args", "IterConfig", "dict"),
    "args of the base trainer": (lambda kind: MADPOConfig(), "args", "IterConfig", "MADPOConfig"),
    "args of another family": (lambda kind: MAGRPOConfig(), "args", "IterConfig", "MAGRPOConfig"),
    "args of the other one": (lambda kind: {"MADPO": MARLHFIterConfig, "MARLHF": MADPOIterConfig}[kind](), "args", "IterConfig", "IterConfig"),
}

CALLS = {
    "adapter as text": (dict(centralized_comparator_adapter="tagged"), "adapter", "build_prompt", "tagged"),
    "adapter without parser": (dict(centralized_comparator_adapter=NoParser()), "adapter", "parse_completion", "NoParser"),
    "no reward": (dict(reward_func=None), "reward_func", "function", "None"),
    "no reward for distributions": (dict(reward_func=None, args=fields(log_reward_distribution=True)), "reward_func", "function", "None"),
    "three agents": (dict(num_agents=3), "num_agents", "num_agents=3", "args.num_agents=2"),
    "a callback that is a function": (dict(callbacks=[print]), "callbacks", "Callback", "print"),
    "wandb_config as text": (dict(wandb_config="project"), "wandb_config", "dictionary", "project"),
    "data as text": (dict(train_dataset="train.jsonl"), "train_dataset", "list of dicts", "str"),
}


def build(kind, folder, args=None, **wrong):
    """A call that is right but for `wrong`."""
    call = dict(agent_model=folder, reward_func=letters, train_dataset=rows(), callbacks=[], args=(args or config)(kind))
    return TRAINERS[kind][0](**{**call, **wrong})


def refused(name, kind, folder, field, *fragments, **wrong):
    with pytest.raises(ValueError) as caught:
        build(kind, folder, **wrong)
    message = str(caught.value)
    for fragment in (field, *fragments):
        assert fragment in message, f"{fragment!r} is not in: {message}"
    assert KEY not in message and len(message) < 700


@pytest.mark.parametrize("name", WRONG)
@BOTH
def test_a_wrong_configuration_names_the_field(kind, name, folder, no_loading):
    args, *said = WRONG[name]
    if "api" in name or "key" in name or "time" in name or "requests" in name or "header" in name:
        pytest.importorskip("httpx"), pytest.importorskip("tenacity")
    refused(name, kind, folder, *said, args=args)
    assert not os.path.exists("runs")


@pytest.mark.parametrize("name", CALLS)
@BOTH
def test_a_wrong_call_names_the_argument(kind, name, folder, no_loading):
    wrong, *said = CALLS[name]
    refused(name, kind, folder, *said, **wrong)


@BOTH
@pytest.mark.parametrize("more", [{}, dict(comparator_policy="model", comparator_model_name=True), dict(comparator_devices=["cpu:0", "cpu:1"])])
def test_the_right_call_loads(kind, more, folder, no_loading):
    """The base of all calls is right: without a mistake the loading begins."""
    more = {name: folder if value is True else value for name, value in more.items()}
    with pytest.raises(AssertionError, match="was loaded"):
        build(kind, folder, args=fields(**more))


def test_a_declared_range_is_enough(folder, no_loading):
    with pytest.raises(AssertionError, match="was loaded"):
        build("MADPO", folder, args=fields(log_reward_distribution=True), reward_func=set_reward_range(lambda first, second: [0.0], 0, 1))


@pytest.mark.parametrize("limits", [(1, 0), (0, 0), (0, float("inf")), "01", (0,)])
def test_a_range_that_is_none(limits, folder, no_loading):
    def reward(first, second):
        return [0.0]

    reward.reward_range = limits
    with pytest.raises(ValueError, match="reward_range"):
        build("MADPO", folder, args=fields(log_reward_distribution=True), reward_func=reward)


def test_a_comparator_that_cannot_read_the_actors_tokens():
    small = micro_model(3, vocab_size=100)
    with pytest.raises(ValueError, match=r"comparator_agents\[1\].*100.*resize_token_embeddings"):
        make(comparator_policy="model", comparator_agents=[micro_model(), small])


# later on

@BOTH
def test_training_needs_data(kind):
    with pytest.raises(ValueError, match="train_dataset"):
        make(kind, train_dataset=None).train()


@pytest.mark.parametrize("parts, said", [(["a"], "2 texts"), ("ab", "one string per role"), (["a", 3], "one string per role")])
def test_an_adapter_with_wrong_parts(parts, said):
    class Wrong:
        def build_prompt(self, batch_item, agent_prompts):
            return "prompt"

        def parse_completion(self, completion, batch_item, num_agents):
            return parts

    trainer = make(comparator_generation_mode="centralized", centralized_comparator_adapter=Wrong())
    with pytest.raises(ValueError, match=f"Wrong.parse_completion.*{said}"):
        joints(trainer)


def test_an_adapters_own_error_surfaces():
    class Broken:
        def build_prompt(self, batch_item, agent_prompts):
            return "prompt"

        def parse_completion(self, completion, batch_item, num_agents):
            raise KeyError("gold")

    trainer = make(comparator_generation_mode="centralized", centralized_comparator_adapter=Broken())
    with pytest.raises(KeyError, match="gold"):
        trainer.train()


@BOTH
def test_a_bad_reward_of_a_comparators_answer_names_the_item(kind):
    asked = []

    def reward(first, second):
        asked.append(1)
        return [float("nan") if len(asked) == 4 * 3 + 6 else 0.5]

    trainer = make(kind, reward_func=reward)
    before = weights(trainer)
    with pytest.raises(ValueError, match="item 1.*nan"):
        trainer.train()
    assert same(weights(trainer), before) and stored(trainer) == [] and len(asked) == 18


@pytest.mark.parametrize("given", [dict(top_k=3), dict(max_new_tokens=4), dict(temperature=0.5)])
def test_fields_of_the_configuration_are_no_keywords_of_train(given):
    with pytest.raises(ValueError, match=f"{next(iter(given))}.*config"):
        make().train(**given)


def test_a_comparators_prompt_longer_than_its_model():
    small = micro_model(4, "gpt2", n_layer=1, n_positions=8)
    trainer = make(comparator_policy="model", comparator_agents=[small] * 2, train_dataset=[{"prompt": "say " + "c" * 20}])
    with pytest.raises(ValueError, match="8 positions.*max_prompt_length"):
        trainer.train()


def test_agents_of_another_number_than_the_stores():
    """A run's own files cannot be mixed with those of a team of another size."""
    trainer = make(num_iterations=1)
    trainer.train()
    three = make(agents=team(("gpt2",) * 3), preference_replay_mode="all_history", reward_func=lambda a, b, c: letters(a, b))
    three.rounds.store.import_rounds(trainer.rounds.store.index.folder)
    with pytest.raises(ValueError, match="pairs of .3. actors beside rounds with pairs of .2."):
        three.train()

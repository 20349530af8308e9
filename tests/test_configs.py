"""The eleven configurations against the reference's fields and defaults, and what they refuse."""
import copy
import dataclasses
import inspect
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import comlrl_nb.trainers
from comlrl_nb.trainers import configs

SURFACE = json.loads((Path(__file__).parent / "data" / "api_surface.json").read_text())
NAMES = [key for key in SURFACE if key.endswith("Config")]
RUN = {"seed": None, "shuffle": False, "output_dir": "runs", "max_prompt_length": None, "on_nonfinite": "raise", "history_file": None, "report_to": None}
PREFERENCE = {"score_last_token": False, "dpo_reference": False}
API = {"comparator_api_max_concurrency": 8, "comparator_api_total_timeout": 600.0}
CHANGED = {"early_termination_threshold": None, "reward_model_device": None}


def config_class(key):
    package, name = key.rsplit(".", 1)
    return getattr(__import__(package, fromlist=[name]), name)


def extras(key):
    ours = dict(RUN)
    if "preference" in key:
        ours |= PREFERENCE
    if "MARLHF" in key:
        ours |= {"reward_holdout": 0.0}
    return ours | API if "Iter" in key else ours


def make(name, **values):
    return getattr(configs, name)(**values)


@pytest.mark.parametrize("key", NAMES)
def test_fields_and_defaults_are_the_references_plus_ours(key):
    theirs = {name: eval(text) for name, text in SURFACE[key]["fields"].items()}
    theirs.update({name: value for name, value in CHANGED.items() if name in theirs})
    ours = {entry.name: entry.default for entry in dataclasses.fields(config_class(key))}
    assert ours == theirs | extras(key)


@pytest.mark.parametrize("key", [key for key in NAMES if "actor_critic" not in key])
def test_positional_order_is_the_references_and_ours_are_keyword_only(key):
    parameters = inspect.signature(config_class(key)).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == list(SURFACE[key]["fields"])
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == set(extras(key))


@pytest.mark.parametrize("name", ["IACConfig", "MAACConfig"])
def test_actor_critic_fields_go_by_name(name):
    with pytest.raises(TypeError, match="by name"):
        getattr(configs, name)(1e-6)


@pytest.mark.parametrize("key", NAMES)
def test_copies_pickles_and_replaces(key):
    config = config_class(key)(seed=3)
    for again in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config, seed=3)):
        assert again == config
    config.validate()
    assert config == config_class(key)(seed=3)
    json.dumps(config.as_dict())


def test_packages_export_their_configurations_lazily():
    for key in NAMES:
        name = key.rsplit(".", 1)[1]
        assert config_class(key) is getattr(comlrl_nb.trainers, name) is getattr(configs, name)
        assert name in comlrl_nb.trainers.__all__ and name in dir(comlrl_nb.trainers)
    with pytest.raises(AttributeError, match="NoSuchTrainer"):
        comlrl_nb.trainers.NoSuchTrainer


GOOD = [
    ("MAGRPOConfig", dict(joint_mode="Align"), dict(joint_mode="aligned")),
    ("MAGRPOConfig", dict(joint_mode="crossed"), dict(joint_mode="cross")),
    ("MAGRPOConfig", dict(parallel_training=None), dict(parallel_training="none")),
    ("MAGRPOConfig", dict(parallel_training="NULL"), dict(parallel_training="none")),
    ("MAGRPOConfig", dict(parallel_training="MP", agent_devices="auto"), dict(parallel_training="mp")),
    ("MAGRPOConfig", dict(parallel_training="mp", agent_devices=[torch.device("cpu")]), {}),
    ("MAGRPOConfig", dict(agent_devices=["cpu", "cpu", "cpu"]), {}),
    ("MAGRPOConfig", dict(train_batch_size=None, rollout_buffer_size=7), dict(train_batch_size=7)),
    ("MAGRPOConfig", dict(num_train_epochs=np.int32(3), discount=np.float32(0.5)), dict(num_train_epochs=3, discount=0.5)),
    ("MAGRPOConfig", dict(top_k=None), {}),
    ("MAGRPOConfig", dict(early_termination_threshold=-1), dict(early_termination_threshold=-1.0)),
    ("MAGRPOConfig", dict(advantage_normalization=np.bool_(False)), dict(advantage_normalization=False)),
    ("MAGRPOConfig", dict(output_dir=Path("runs/a")), {}),
    ("MAGRPOConfig", dict(eval_interval=0, eval_num_samples=0), {}),
    ("CentralizedMAGRPOConfig", dict(num_agents=3, parallel_training="mp", agent_devices=["cpu"]), dict(num_actors=1)),
    ("IACConfig", dict(parallel_training="mp", agent_devices="cpu", use_separate_critic=False), {}),
    ("IACConfig", dict(critic_learning_rate=None, agent_learning_rate=1e-3), dict(critic_learning_rate=1e-3)),
    ("IACConfig", dict(critic_type="Q", value_clip_range=None), dict(critic_type="q")),
    ("MAACConfig", dict(num_turns=1, num_generations=3), {}),
    ("MAACConfig", dict(parallel_training="mp", agent_devices="cpu", critic_devices=["cpu"]), {}),
    ("MADPOConfig", dict(pair_selection="ALL", preference_pairs_per_sample=None), dict(pair_selection="all")),
    ("MADPOConfig", dict(score_last_token=True, dpo_reference=True), {}),
    ("MARLHFConfig", dict(rl_algorithm="mareforce"), dict(rl_algorithm="mareinforce", advantage_mode="raw")),
    ("MARLHFConfig", dict(rl_algorithm="maremax"), dict(advantage_mode="max")),
    ("MARLHFConfig", dict(rl_algorithm="marloo"), dict(advantage_mode="rloo")),
    ("MARLHFConfig", dict(rl_algorithm="iac", num_generations=1), {}),
    ("MARLHFConfig", {}, dict(critic_learning_rate=None)),
    ("MADPOIterConfig", dict(preference_replay_k=1), {}),
    ("MADPOIterConfig", dict(preference_replay_mode="k", preference_replay_k=2), dict(preference_replay_mode="nearest_k")),
    ("MADPOIterConfig", dict(preference_replay_mode="lambda", preference_replay_lambda=0), dict(preference_replay_lambda=0.0)),
    ("MADPOIterConfig", dict(comparator_policy="previous"), dict(comparator_policy="history", comparator_history_k=1)),
    ("MADPOIterConfig", dict(comparator_policy="model", comparator_agents=["a", "b"]), {}),
    ("MADPOIterConfig", dict(comparator_policy="model", comparator_model_name="a", comparator_generation_mode="single-agent"),
     dict(comparator_generation_mode="centralized")),
    ("MADPOIterConfig", dict(comparator_policy="api", comparator_api_url="http://127.0.0.1:8000/v1", comparator_api_format="codex"),
     dict(comparator_api_format="openai_responses")),
    ("MADPOIterConfig", dict(collaboration_mode="centralized"), dict(comparator_generation_mode="centralized")),
    ("MADPOIterConfig", dict(comparator_num_candidates=5), dict(comparator_candidates=5)),
    ("MARLHFIterConfig", dict(preference_scoring_reward="learned"), dict(preference_scoring_reward="reward_model")),
]


@pytest.mark.parametrize("name, values, expected", GOOD, ids=lambda part: str(part)[:60])
def test_accepts(name, values, expected):
    config = make(name, **values)
    assert {key: getattr(config, key) for key in expected} == expected


REPLAY = "preference_replay_mode"
BAD = [  # configuration, what is wrong, the field the message must name, what it must say is allowed
    ("MAGRPOConfig", dict(num_train_epochs=0), "num_train_epochs", "at least 1"),
    ("MAGRPOConfig", dict(num_train_epochs=1.0), "num_train_epochs", "an integer"),
    ("MAGRPOConfig", dict(num_agents=True), "num_agents", "an integer"),
    ("MAGRPOConfig", dict(num_agents=0), "num_agents", "at least 1"),
    ("MAGRPOConfig", dict(agent_learning_rate="5e-6"), "agent_learning_rate", "a finite number"),
    ("MAGRPOConfig", dict(agent_learning_rate=float("nan")), "agent_learning_rate", "a finite number"),
    ("MAGRPOConfig", dict(agent_learning_rate=-1e-6), "agent_learning_rate", "at least 0"),
    ("MAGRPOConfig", dict(logging_steps=0), "logging_steps", "at least 1"),
    ("MAGRPOConfig", dict(num_generations=1), "num_generations", "at least 2"),
    ("MAGRPOConfig", dict(max_new_tokens=0), "max_new_tokens", "at least 1"),
    ("MAGRPOConfig", dict(temperature=0.0), "temperature", "above 0"),
    ("MAGRPOConfig", dict(temperature=float("inf")), "temperature", "a finite number"),
    ("MAGRPOConfig", dict(top_p=0), "top_p", "above 0 and at most 1"),
    ("MAGRPOConfig", dict(top_p=1.01), "top_p", "at most 1"),
    ("MAGRPOConfig", dict(top_k=-1), "top_k", "None or an integer of at least 0"),
    ("MAGRPOConfig", dict(num_turns=0), "num_turns", "at least 1"),
    ("MAGRPOConfig", dict(discount=1.5), "discount", "at most 1"),
    ("MAGRPOConfig", dict(joint_mode="all"), "joint_mode", "'aligned', 'cross'"),
    ("MAGRPOConfig", dict(joint_mode=None), "joint_mode", "'aligned', 'cross'"),
    ("MAGRPOConfig", dict(early_termination_threshold=float("inf")), "early_termination_threshold", "None or a finite number"),
    ("MAGRPOConfig", dict(external_prompt_passthrough="False"), "external_prompt_passthrough", "True or False"),
    ("MAGRPOConfig", dict(eval_interval=-1), "eval_interval", "at least 0"),
    ("MAGRPOConfig", dict(eval_batch_size=0), "eval_batch_size", "at least 1"),
    ("MAGRPOConfig", dict(rollout_buffer_size=0), "rollout_buffer_size", "at least 1"),
    ("MAGRPOConfig", dict(train_batch_size=0), "train_batch_size", "at least 1"),
    ("MAGRPOConfig", dict(advantage_mode="median"), "advantage_mode", "'mean', 'raw', 'rloo', 'max'"),
    ("MAGRPOConfig", dict(reference_kl_coef=-0.1), "reference_kl_coef", "at least 0"),
    ("MAGRPOConfig", dict(reference_devices=["cpu"] * 3), "reference_devices", "1 or 2"),
    ("MAGRPOConfig", dict(parallel_training="dp"), "parallel_training", "'none', 'mp'"),
    ("MAGRPOConfig", dict(parallel_training="mp"), "agent_devices", "when parallel_training='mp'"),
    ("MAGRPOConfig", dict(parallel_training="mp", agent_devices=["cpu"] * 3), "agent_devices", "1 or 2"),
    ("MAGRPOConfig", dict(agent_devices="gpu0"), "agent_devices", "a device name"),
    ("MAGRPOConfig", dict(agent_devices=[]), "agent_devices", "a list of device names"),
    ("MAGRPOConfig", dict(seed=-1), "seed", "at least 0"),
    ("MAGRPOConfig", dict(output_dir=""), "output_dir", "a path"),
    ("MAGRPOConfig", dict(max_prompt_length=0), "max_prompt_length", "at least 1"),
    ("MAGRPOConfig", dict(on_nonfinite="ignore"), "on_nonfinite", "'raise', 'skip'"),
    ("CentralizedMAGRPOConfig", dict(num_turns=2), "num_turns", "1 with a central actor"),
    ("CentralizedMAGRPOConfig", dict(collaboration_mode="decentralized"), "collaboration_mode", "'centralized'"),
    ("IACConfig", dict(num_generations=2), "num_generations", "num_turns=2"),
    ("IACConfig", dict(critic_type="a"), "critic_type", "'v', 'q'"),
    ("IACConfig", dict(value_clip_range=0.0), "value_clip_range", "None or a finite number above 0"),
    ("IACConfig", dict(value_head_hidden_dim=0), "value_head_hidden_dim", "at least 1"),
    ("IACConfig", dict(parallel_training="mp", agent_devices="cpu"), "critic_devices", "use_separate_critic=True"),
    ("IACConfig", dict(parallel_training="mp", agent_devices="cpu", critic_devices=["cpu"] * 3), "critic_devices", "1 or 2"),
    ("MAACConfig", dict(critic_devices=["cpu", "cpu"]), "critic_devices", "a list of 1"),
    ("MAACConfig", dict(parallel_training="mp", agent_devices="cpu"), "critic_devices", "parallel_training='mp'"),
    ("MADPOConfig", dict(num_turns=2), "num_turns", "1 in preference training"),
    ("MADPOConfig", dict(joint_mode="cross"), "joint_mode", "'aligned'"),
    ("MADPOConfig", dict(preference_num_candidates=1), "preference_num_candidates", "at least 2"),
    ("MADPOConfig", dict(preference_pairs_per_sample=0), "preference_pairs_per_sample", "None or an integer of at least 1"),
    ("MADPOConfig", dict(pair_selection="all"), "preference_pairs_per_sample", "None when pair_selection='all'"),
    ("MADPOConfig", dict(pair_selection="comparator_reward"), "pair_selection", "'reward_gap', 'random', 'all'"),
    ("MADPOConfig", dict(dpo_beta=0), "dpo_beta", "above 0"),
    ("MADPOConfig", dict(environment_steps_per_pair=0), "environment_steps_per_pair", "at least 1"),
    ("MADPOConfig", dict(collaboration_mode="both"), "collaboration_mode", "'decentralized', 'centralized'"),
    ("MADPOConfig", dict(collaboration_mode="centralized", score_last_token=True), "score_last_token", "False when"),
    ("MADPOConfig", dict(collaboration_mode="centralized", parallel_training="mp", agent_devices=["cpu"] * 2), "agent_devices", "of 1"),
    ("MARLHFConfig", dict(rl_algorithm="ppo"), "rl_algorithm", "'magrpo'"),
    ("MARLHFConfig", dict(num_generations=1), "num_generations", "at least 2"),
    ("MARLHFConfig", dict(reward_learning_rate=0), "reward_learning_rate", "above 0"),
    ("MARLHFConfig", dict(critic_learning_rate=0.0), "critic_learning_rate", "above 0"),
    ("MARLHFConfig", dict(value_loss_coef=0.0), "value_loss_coef", "above 0"),
    ("MARLHFConfig", dict(reward_model_device=["cpu"]), "reward_model_device", "None or one device name"),
    ("MARLHFConfig", dict(rl_algorithm="maac", critic_devices=["cpu", "cpu"]), "critic_devices", "a list of 1"),
    ("MADPOIterConfig", dict(num_iterations=0), "num_iterations", "at least 1"),
    ("MADPOIterConfig", {REPLAY: "newest"}, REPLAY, "'lambda_decay'"),
    ("MADPOIterConfig", dict(preference_replay_k=2), "preference_replay_k", "None or 1 when preference_replay_mode='current'"),
    ("MADPOIterConfig", dict(preference_replay_sample_size=4), "preference_replay_sample_size", "preference_replay_mode='current'"),
    ("MADPOIterConfig", dict(preference_replay_lambda=0.5), "preference_replay_lambda", "preference_replay_mode='current'"),
    ("MADPOIterConfig", {REPLAY: "nearest_k"}, "preference_replay_k", "given when preference_replay_mode='nearest_k'"),
    ("MADPOIterConfig", {REPLAY: "nearest_k", "preference_replay_k": 0}, "preference_replay_k", "at least 1"),
    ("MADPOIterConfig", {REPLAY: "nearest_k", "preference_replay_k": 2, "preference_replay_lambda": 0.5}, "preference_replay_lambda", "None when"),
    ("MADPOIterConfig", {REPLAY: "all_history", "preference_replay_k": 2}, "preference_replay_k", "None when"),
    ("MADPOIterConfig", {REPLAY: "lambda_decay"}, "preference_replay_lambda", "given when"),
    ("MADPOIterConfig", {REPLAY: "lambda_decay", "preference_replay_lambda": 1.1}, "preference_replay_lambda", "at most 1"),
    ("MADPOIterConfig", {REPLAY: "lambda_decay", "preference_replay_lambda": 1, "preference_replay_k": 3}, "preference_replay_k", "None when"),
    ("MADPOIterConfig", dict(comparator_policy="friend"), "comparator_policy", "'api'"),
    ("MADPOIterConfig", dict(comparator_policy="model"), "comparator_model_name", "comparator_agents"),
    ("MADPOIterConfig", dict(comparator_model_name="m"), "comparator_model_name", "comparator_policy='current'"),
    ("MADPOIterConfig", dict(comparator_policy="model", comparator_agents=["a"]), "comparator_agents", "a list of 2"),
    ("MADPOIterConfig", dict(comparator_policy="model", comparator_agents="a"), "comparator_agents", "a list of 2"),
    ("MADPOIterConfig", dict(comparator_history_k=1), "comparator_history_k", "comparator_policy='current'"),
    ("MADPOIterConfig", dict(comparator_policy="history", comparator_history_k=0), "comparator_history_k", "at least 1"),
    ("MADPOIterConfig", dict(comparator_generation_mode="half"), "comparator_generation_mode", "'centralized'"),
    ("MADPOIterConfig", dict(comparator_generation_mode="centralized", comparator_centralized_agent_index=2),
     "comparator_centralized_agent_index", "num_agents=2"),
    ("MADPOIterConfig", dict(collaboration_mode="centralized", comparator_centralized_agent_index=1),
     "comparator_centralized_agent_index", "0 when"),
    ("MADPOIterConfig", dict(comparator_num_candidates=0), "comparator_num_candidates", "at least 1"),
    ("MADPOIterConfig", dict(comparator_policy="api"), "comparator_api_url", "comparator_policy='api'"),
    ("MADPOIterConfig", dict(comparator_policy="api", comparator_api_url="models.example/v1"), "comparator_api_url", "http"),
    ("MADPOIterConfig", dict(comparator_api_format="grpc"), "comparator_api_format", "'openai_responses'"),
    ("MADPOIterConfig", dict(comparator_api_timeout=0), "comparator_api_timeout", "above 0"),
    ("MADPOIterConfig", dict(comparator_api_total_timeout=0), "comparator_api_total_timeout", "above 0"),
    ("MADPOIterConfig", dict(comparator_api_max_concurrency=0), "comparator_api_max_concurrency", "at least 1"),
    ("MADPOIterConfig", dict(comparator_api_max_n_per_request=0), "comparator_api_max_n_per_request", "at least 1"),
    ("MADPOIterConfig", dict(comparator_api_extra_body=[1]), "comparator_api_extra_body", "a mapping"),
    ("MADPOIterConfig", dict(comparator_api_headers={"a": 1}), "comparator_api_headers", "a mapping"),
    ("MARLHFIterConfig", dict(preference_scoring_reward="mine"), "preference_scoring_reward", "'reward_model'"),
    ("MAGRPOConfig", dict(agent_learning_rate=10**400), "agent_learning_rate", "a finite number"),
    ("MAGRPOConfig", dict(num_generations=2**63), "num_generations", "an integer of at least"),
    ("MAGRPOConfig", dict(joint_mode=np.array(["aligned", "cross"])), "joint_mode", "'aligned'"),
    ("MAGRPOConfig", dict(joint_mode=["aligned"]), "joint_mode", "'aligned'"),
    *(("MAGRPOConfig", dict(report_to=value), "report_to", "each once") for value in (0, False, {"wandb": 1}, ["tensorboard", "tensorboard"], [["wandb"]], "wandb,trackio")),
    *(("MAGRPOConfig", {field: "runs\0"}, field, "a path") for field in ("output_dir", "history_file")),
]


@pytest.mark.parametrize("name, values, field, allowed", BAD, ids=lambda part: str(part)[:60])
def test_refuses_and_says_why(name, values, field, allowed):
    with pytest.raises(ValueError) as caught:
        make(name, **values)
    message = str(caught.value)
    assert message.startswith(f"{name}: {field} must be ") and allowed in message
    hidden = field in ("comparator_api_headers", "comparator_api_extra_body", "comparator_api_url")
    assert hidden or field not in values or message.endswith(f"got {values[field]!r}")


def test_every_configuration_names_an_unknown_field():
    for key in NAMES:
        with pytest.raises(TypeError, match="no_such_field"):
            config_class(key)(no_such_field=1)


@pytest.mark.parametrize("name, remedy", [("num_generation", "did you mean num_generations"), ("learning_rate", "did you mean agent_learning_rate"), ("per_device_train_batch_size", "train_batch_size"),
                                          ("checkpoint_dir", "it is an argument of train"), ("zzz", "nothing there has a name like it")])
def test_an_unknown_field_is_answered_with_the_nearest_one(name, remedy):
    with pytest.raises(TypeError, match=f"^MAGRPOConfig: there is no field '{name}'; .*{remedy}"):
        configs.MAGRPOConfig(**{name: 1})


def test_validate_sees_a_later_change_and_resolves_aliases_again():
    args = configs.MAGRPOConfig()
    args.joint_mode = "crossed"
    args.validate()
    assert args.joint_mode == "cross"
    args.temperature = -1
    with pytest.raises(ValueError, match="temperature"):
        args.validate()


def test_secrets_are_never_shown():
    secrets = dict(comparator_api_key="sk-SECRET123", comparator_api_headers={"x-api-key": "sk-SECRET123"},
                   comparator_api_extra_body={"token": "sk-SECRET123"})
    args = configs.MADPOIterConfig(**secrets)
    assert "SECRET" not in repr(args) + str(args) + json.dumps(args.as_dict()) + args._repr_markdown_()
    assert args.comparator_api_key == "sk-SECRET123"
    for bad in (dict(comparator_api_key="sk-SECRET123\n"), dict(comparator_api_url="https://u:sk-SECRET123@host/v1"),
                dict(comparator_api_headers="sk-SECRET123"), dict(comparator_api_key=["sk-SECRET123"])):
        with pytest.raises(ValueError) as caught:
            configs.MADPOIterConfig(**bad)
        assert "SECRET" not in str(caught.value) and next(iter(bad)) in str(caught.value)

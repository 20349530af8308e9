"""Wrong calls of MAAC and IAC: each names its field and what is allowed, before a model is loaded or a token sampled."""
import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel

from comlrl_nb.models.actor_critic import CausalLMWithValueHead
from comlrl_nb.toy import micro_model
from comlrl_nb.trainers.actor_critic import IACConfig, IACTrainer, MAACConfig, MAACTrainer
from comlrl_nb.trainers.configs import MAGRPOConfig
from actor_critic_runs import TOKENIZER, config, critic, everything, letters, make, onward, rows, same, team

CLASSES = {"MAAC": MAACTrainer, "IAC": IACTrainer}
ONE, TWO, JUDGE, OTHER = micro_model(0, "gpt2"), micro_model(1, "gpt2"), critic(50), critic(51)
SMALL_VOCABULARY = critic(52, vocab_size=100)
SHARED = dict(use_separate_critic=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model with its tokenizer, so that only what is wrong stands between a call and the loading."""
    path = tmp_path_factory.mktemp("model")
    micro_model().save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return str(path)


@pytest.fixture
def no_loading(monkeypatch):
    """Loading, building or sampling from a model fails the test."""
    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded or sampled from")

    for owner, name in ((AutoModelForCausalLM, "from_pretrained"), (AutoModelForCausalLM, "from_config"), (PreTrainedModel, "from_pretrained"),
                        (GenerationMixin, "generate"), (torch.nn.Module, "to")):
        monkeypatch.setattr(owner, name, refuse)


class Later:
    """A value that is made inside the call."""

    def __init__(self, make):
        self.make = make


def fields(**wrong):
    return wrong


def build(folder, name, args=None, **wrong):
    """A call that is right but for `wrong`; `args` are fields of the configuration."""
    call = dict(agent_model=folder, critic_model=folder, reward_func=letters, train_dataset=rows(), callbacks=[])
    if not (args or {}).get("use_separate_critic", True) if isinstance(args, dict) else False:
        call.pop("critic_model")
    if "agents" in wrong:
        call.pop("agent_model")
    if "critics" in wrong:
        call.pop("critic_model", None)
    made = config(name, **(args or {})) if args is None or isinstance(args, dict) else args
    return CLASSES[name](**{**call, "args": made, **wrong})


OBJECTS = dict(agents=[ONE, TWO], tokenizer=TOKENIZER)
BOTH = ("MAAC", "IAC")
HEADLESS = CausalLMWithValueHead(micro_model(), attach_value_head=False)

WRONG = {
    # what the source document asks of agents
    "an object for two agents": (BOTH, dict(agent_model=ONE, tokenizer=TOKENIZER), "agent_model", "agents=[...]", "GPT2LMHeadModel"),
    "no model": (BOTH, dict(agent_model=None), "agent_model", "None", "agents"),
    "empty name": (BOTH, dict(agent_model=""), "agent_model", "identifier", "''"),
    "agents without a tokenizer": (BOTH, dict(agents=[ONE, TWO]), "tokenizer", "must be given", "None"),
    "names and objects": (BOTH, dict(agents=["some/model", ONE], tokenizer=TOKENIZER), "agents", "mixture", "identifiers"),
    "three agents for two": (BOTH, dict(agents=[ONE, TWO, OTHER], tokenizer=TOKENIZER), "num_agents", "len(agents)=3", "args.num_agents=2"),
    "three tokenizers": (BOTH, dict(agents=[ONE, TWO], tokenizer=[TOKENIZER] * 3), "tokenizer", "2", "3"),
    "agents that are none": (BOTH, dict(agents=[ONE, None], tokenizer=TOKENIZER), "agents[1]", "model", "None"),
    "an agent's vocabulary": (BOTH, dict(agents=[ONE, SMALL_VOCABULARY], tokenizer=TOKENIZER), "agents[1]", "100", str(len(TOKENIZER))),
    "another name": (BOTH, dict(agent_model="a/model", agents=["b/model", "b/model"]), "agent_model", "a/model", "b/model"),
    # and of critics
    "no critic": (BOTH, dict(critic_model=None), "critic_model=None", "critics=None", "give one"),
    "an empty critic name": (BOTH, dict(critic_model=""), "critic_model", "identifier", "''"),
    "a critic that is a number": (BOTH, dict(critic_model=7), "critic_model", "model", "7"),
    "a critic that is a class": (BOTH, dict(critic_model=CausalLMWithValueHead), "critic_model", "model", "class"),
    "two critics for one": (("MAAC",), dict(critics=[JUDGE, OTHER]), "critics", "2", "1 critic, shared by all agents"),
    "no critics for one": (("MAAC",), dict(critics=[]), "critics", "0", "1 critic"),
    "one critic for two": (("IAC",), dict(critics=[JUDGE]), "critics", "has 1", "one critic per agent (2)"),
    "three critics for two": (("IAC",), dict(critics=[JUDGE, OTHER, critic(53)]), "critics", "has 3", "(2)"),
    "critics as one object": (BOTH, dict(critics=JUDGE), "critics", "list", "GPT2LMHeadModel"),
    "critics as text": (BOTH, dict(critics="some/model"), "critics", "list", "some/model"),
    "None among critics": (("IAC",), dict(critics=[JUDGE, None]), "critics[1]", "model", "None"),
    "an empty name among critics": (("IAC",), dict(critics=["some/model", ""]), "critics[1]", "identifier", "''"),
    "critics of another name": (("IAC",), dict(critic_model="a/model", critics=["b/model", "b/model"]), "critic_model", "a/model", "b/model"),
    "critics beside shared heads": (("IAC",), dict(args=SHARED, critics=[JUDGE, OTHER]), "critics", "use_separate_critic=False", "use_separate_critic=True"),
    "a critic beside shared heads": (("IAC",), dict(args=SHARED, critic_model=JUDGE), "critic_model", "use_separate_critic=False", "use_separate_critic=True"),
    "a critic's name beside shared heads": (("IAC",), dict(args=SHARED, critic_model="some/model"), "critic_model", "use_separate_critic=False", "None"),
    "an empty list beside shared heads": (("IAC",), dict(args=SHARED, critics=[]), "critics", "use_separate_critic=False", "None"),
    "a critic without a head": (BOTH, dict(critic_model=HEADLESS), "critic_model", "without a value head", "attach_value_head=True"),
    "critics without a head": (("IAC",), dict(critics=[JUDGE, HEADLESS]), "critics[1]", "without a value head", "attach_value_head=True"),
    "a critic's vocabulary": (BOTH, dict(critic_model=SMALL_VOCABULARY, **OBJECTS), "critic_model", "100", str(len(TOKENIZER))),
    "a critic's vocabulary, agents by name": (BOTH, dict(critic_model=SMALL_VOCABULARY, tokenizer=TOKENIZER), "critic_model", "100", str(len(TOKENIZER))),
    "a listed critic's vocabulary": (("IAC",), dict(critics=[JUDGE, SMALL_VOCABULARY], **OBJECTS), "critics[1]", "100", str(len(TOKENIZER))),
    "a critic's name that does not exist": (BOTH, dict(critic_model="/no/such/folder"), "/no/such/folder", "loaded", "folder"),
    "an agent as its own critic": (("IAC",), dict(critics=[ONE, JUDGE], **OBJECTS), "critics[0]", "two optimizers", "use_separate_critic=False"),
    "another agent as critic": (("IAC",), dict(critics=[TWO, JUDGE], **OBJECTS), "critics[0]", "parameters of an agent", "copy"),
    "an agent as the shared critic": (BOTH, dict(critic_model=ONE, **OBJECTS), "critic_model", "parameters of an agent", "copy"),
    "a head on an agent as critic": (("MAAC",), dict(critics=[CausalLMWithValueHead(ONE)], **OBJECTS), "critics[0]", "parameters of an agent", "copy"),
    # turns
    "two turns without a transition": (BOTH, dict(args=fields(num_turns=2)), "external_transition", "None", "num_turns=2"),
    "a transition that is none": (BOTH, dict(args=fields(num_turns=2), external_transition="next"), "external_transition", "callable", "'next'"),
    "several samples of two turns": (BOTH, dict(args=Later(lambda name: config(name, num_turns=2, num_generations=2)), external_transition=onward), "num_generations", "1 when num_turns=2", "2"),
    # devices
    "three critic devices": (("IAC",), dict(args=Later(lambda name: config(name, parallel_training="mp", agent_devices="cpu", critic_devices=["cpu"] * 3))), "critic_devices", "1 or 2", "cpu"),
    "two devices for one critic": (("MAAC",), dict(args=Later(lambda name: config(name, critic_devices=["cpu", "cpu"]))), "critic_devices", "1", "cpu"),
    "three critic devices on one machine": (("IAC",), dict(args=fields(critic_devices=["cpu"] * 3)), "critic_devices", "2", "3 entries"),
    "mp without critic devices": (BOTH, dict(args=Later(lambda name: config(name, parallel_training="mp", agent_devices="cpu"))), "critic_devices", "mp", "None"),
    "mp without agent devices": (BOTH, dict(args=Later(lambda name: config(name, parallel_training="mp", critic_devices="cpu"))), "agent_devices", "mp", "None"),
    "a critic device that is not here": (BOTH, dict(args=fields(critic_devices="cuda:63")), "critic_devices", "cpu", "cuda:63"),
    "a critic device that is a number": (BOTH, dict(args=Later(lambda name: config(name, critic_devices=3))), "critic_devices", "device", "3"),
    "three reference devices": (BOTH, dict(args=Later(lambda name: config(name, reference_kl_enabled=True, reference_devices=["cpu"] * 3))), "reference_devices", "1 or 2", "cpu"),
    "unknown parallel mode": (BOTH, dict(args=Later(lambda name: config(name, parallel_training="ddp"))), "parallel_training", "mp", "ddp"),
    # fields
    "an unknown critic type": (BOTH, dict(args=Later(lambda name: config(name, critic_type="a"))), "critic_type", "'v', 'q'", "'a'"),
    "a negative coefficient": (BOTH, dict(args=Later(lambda name: config(name, value_loss_coef=-1))), "value_loss_coef", "at least 0", "-1"),
    "a clip range of zero": (("IAC",), dict(args=Later(lambda name: config(name, value_clip_range=0))), "value_clip_range", "above 0", "0"),
    "a negative clip range": (("IAC",), dict(args=Later(lambda name: config(name, value_clip_range=-0.2))), "value_clip_range", "above 0", "-0.2"),
    "no buffer": (BOTH, dict(args=Later(lambda name: config(name, rollout_buffer_size=0))), "rollout_buffer_size", "at least 1", "0"),
    "no batch": (BOTH, dict(args=Later(lambda name: config(name, train_batch_size=0))), "train_batch_size", "at least 1", "0"),
    "no samples": (BOTH, dict(args=Later(lambda name: config(name, num_generations=0))), "num_generations", "at least 1", "0"),
    "no turns": (BOTH, dict(args=Later(lambda name: config(name, num_turns=0))), "num_turns", "at least 1", "0"),
    "a discount above 1": (BOTH, dict(args=Later(lambda name: config(name, discount=1.5))), "discount", "at most 1", "1.5"),
    "a critic's negative rate": (BOTH, dict(args=Later(lambda name: config(name, critic_learning_rate=-1e-5))), "critic_learning_rate", "at least 0", "-1e-05"),
    "a threshold that is no number": (BOTH, dict(args=Later(lambda name: config(name, early_termination_threshold="high"))), "early_termination_threshold", "number", "high"),
    "text for a flag": (("IAC",), dict(args=Later(lambda name: config(name, use_separate_critic="False"))), "use_separate_critic", "True or False", "'False'"),
    "a head of no units": (("IAC",), dict(args=Later(lambda name: config(name, value_head_hidden_dim=0))), "value_head_hidden_dim", "at least 1", "0"),
    "a critic's head of no units": (("IAC",), dict(args=Later(lambda name: config(name, critic_value_head_hidden_dim=0))), "critic_value_head_hidden_dim", "at least 1", "0"),
    "a shared critic's head of no units": (("MAAC",), dict(model_config={"critic_value_head_hidden_dim": 0}), "critic_value_head_hidden_dim", "positive integer", "0"),
    "a negative penalty": (BOTH, dict(args=Later(lambda name: config(name, reference_kl_coef=-0.1))), "reference_kl_coef", "at least 0", "-0.1"),
    "unknown key of the model configuration": (BOTH, dict(model_config={"critic_head": 3}), "model_config", "critic_head", "critic_value_head_hidden_dim"),
    "critic options in words": (BOTH, dict(model_config={"critic_model_kwargs": "bf16"}), "critic_model_kwargs", "dictionary", "bf16"),
    # the other arguments
    "args of another family": (BOTH, dict(args=MAGRPOConfig()), "args", "Config", "MAGRPOConfig"),
    "MAAC's args for IAC": (("IAC",), dict(args=MAACConfig()), "args", "IACConfig", "MAACConfig"),
    "IAC's args for MAAC": (("MAAC",), dict(args=IACConfig()), "args", "MAACConfig", "IACConfig"),
    "args as a class": (BOTH, dict(args=MAACConfig), "args", "Config", "type"),
    "no reward": (BOTH, dict(reward_func=None), "reward_func", "function", "None"),
    "a reward for four": (BOTH, dict(reward_func=lambda a, b, c, d: 0.0), "reward_func", "2 agents", "'a', 'b', 'c', 'd'"),
    "a processor that is a number": (BOTH, dict(reward_processor=2.0), "reward_processor", "callable", "2.0"),
    "one formatter too few": (BOTH, dict(formatters=[str]), "formatters", "2 callables", "["),
    "a metrics callback that is none": (BOTH, dict(metrics_callback="count"), "metrics_callback", "callable", "'count'"),
    "data as text": (BOTH, dict(train_dataset="train.jsonl"), "train_dataset", "list of dicts", "str"),
    "held-out rows of text": (BOTH, dict(eval_dataset=["a"]), "eval_dataset[0]", "mapping", "str"),
    "wandb_config as text": (BOTH, dict(wandb_config="my-project"), "wandb_config", "dictionary", "my-project"),
    "callbacks as a number": (BOTH, dict(callbacks=3), "callbacks", "Callback", "3"),
}
CALLS = [(name, wrong) for wrong in WRONG for name in WRONG[wrong][0]]


@pytest.mark.parametrize("name, wrong", CALLS)
def test_wrong_constructor_call(name, wrong, folder, no_loading, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    _, given, field, *fragments = WRONG[wrong]
    with pytest.raises(ValueError) as caught:
        build(folder, name, **{key: value.make(name) if isinstance(value, Later) else value for key, value in given.items()})
    message = str(caught.value)
    for fragment in (field, *fragments):
        assert fragment in message, f"{fragment!r} is not in: {message}"
    assert len(message) < 600


def test_there_are_enough_of_them():
    assert len(WRONG) >= 60


@pytest.mark.parametrize("name, args", [("MAAC", {}), ("IAC", {}), ("IAC", SHARED)])
def test_the_right_call_loads(name, args, folder, no_loading):
    """The base of all calls is right: without a mistake the loading begins."""
    with pytest.raises(AssertionError, match="loaded"):
        build(folder, name, args)


def test_maac_has_no_value_clip_range():
    with pytest.raises(TypeError, match="value_clip_range"):
        MAACConfig(value_clip_range=0.2)
    assert not {"value_clip_range", "use_separate_critic", "value_head_hidden_dim"} & vars(MAACConfig()).keys() and IACConfig().value_clip_range == 0.2


@pytest.mark.parametrize("cls", [MAACConfig, IACConfig])
def test_unknown_fields_and_positions_are_type_errors(cls):
    with pytest.raises(TypeError, match="joint_mode"):
        cls(joint_mode="cross")
    with pytest.raises(TypeError, match="by name"):
        cls(5)


@pytest.mark.parametrize("name", BOTH)
def test_unknown_arguments_are_type_errors(name):
    for unknown in ("num_agents", "eval_logger", "eval_aggregator"):
        with pytest.raises(TypeError, match=unknown):
            CLASSES[name](**{unknown: 2})


# what can be told only when models are there, or later

def test_one_critic_object_on_two_devices():
    with pytest.raises(ValueError, match=r"critic_devices: critics\[0\] and critics\[1\] are the same object but should live on cpu:0 and cpu:1; give them one device, or copies"):
        make(name="IAC", critic_model=critic(), critics=None, parallel_training="mp", agent_devices="cpu", critic_devices=["cpu:0", "cpu:1"])


def test_one_agent_object_on_two_devices(no_loading):
    with pytest.raises(ValueError, match="agent_devices.*same object"):
        make([ONE, ONE], name="IAC", critics=[JUDGE, OTHER], parallel_training="mp", agent_devices=["cpu:0", "cpu:1"], critic_devices="cpu")


@pytest.mark.parametrize("name", BOTH)
def test_a_critic_without_anything_to_train(name):
    frozen = CausalLMWithValueHead(critic()).requires_grad_(False)
    with pytest.raises(ValueError, match=r"critics\[0\]: no parameter .*requires a gradient"):
        make(name=name, critic_model=frozen, critics=None)


def test_a_frozen_body_with_a_head_to_train_is_fine():
    body = critic().requires_grad_(False)
    before = copy.deepcopy(body.state_dict())
    trainer = make(critic_model=body, critics=None)
    head = copy.deepcopy(trainer.critics[0].value_head.state_dict())
    trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in body.state_dict().items()) and not torch.equal(head["out.weight"], trainer.critics[0].value_head.out.weight)


def test_agents_whose_heads_are_missing():
    agents = [CausalLMWithValueHead(model, attach_value_head=False) for model in team()]
    with pytest.raises(ValueError, match=r"agents\[0\] has no value head.*use_separate_critic=False.*attach_value_head=True"):
        make(agents, name="IAC", use_separate_critic=False)
    make(agents, name="IAC")  # with critics of their own they need none


def test_a_saved_critics_vocabulary(tmp_path, folder):
    SMALL_VOCABULARY.save_pretrained(tmp_path)
    for name, label in (("MAAC", "critic_model"), ("IAC", "critic_model")):
        with pytest.raises(ValueError, match=f"{label} has 100 embeddings.*{len(TOKENIZER)}"):
            build(folder, name, critic_model=str(tmp_path))
    with pytest.raises(ValueError, match=r"critics\[1\] has 100 embeddings"):
        build(folder, "IAC", critics=[folder, str(tmp_path)])


def test_another_head_size_than_saved(tmp_path, folder):
    CausalLMWithValueHead(critic(), 6).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="value_head_hidden_dim=5.*has 6"):
        build(folder, "MAAC", critic_model=str(tmp_path), model_config={"critic_value_head_hidden_dim": 5})
    assert build(folder, "MAAC", critic_model=str(tmp_path)).critics[0].value_head.hidden.out_features == 6


def test_added_tokens_make_room_in_named_critics(tmp_path, folder):
    trainer = build(folder, "MAAC", model_config={"special_tokens": {"additional_special_tokens": ["<one>", "<two>"]}})
    assert trainer.critics[0].model.get_input_embeddings().weight.shape[0] == len(TOKENIZER) + 2 == trainer.agents[0].model.get_input_embeddings().weight.shape[0]
    trainer.train()


@pytest.mark.parametrize("devices", ["cuda:63", ["cpu"] * 7])
def test_critic_devices_of_shared_heads(devices, folder, no_loading):
    with pytest.raises(ValueError, match="critic_devices"):
        build(folder, "IAC", dict(critic_devices=devices, **SHARED))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("value", ["", None, 7])
def test_formatter_that_returns_no_text(name, value):
    trainer = make(name=name, formatters=[lambda item: "fine", lambda item: value])
    before = everything(trainer)
    with pytest.raises(ValueError, match="formatter of agent 1.*non-empty string"):
        trainer.train()
    assert same(before, everything(trainer))


def test_items_given_by_hand_are_checked():
    for wrong in (["text"], [3]):
        with pytest.raises(ValueError, match="mapping"):
            make().step(wrong)
    with pytest.raises(ValueError, match="mapping"):
        make().rollout("text")

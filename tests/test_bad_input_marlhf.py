"""Wrong constructor calls of MARLHF: each names its field and what is allowed, before a model is loaded or a token sampled. Then wrong calls later on."""
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel

from comlrl_nb.callbacks import Callback
from comlrl_nb.models.actor_critic import CausalLMWithValueHead
from comlrl_nb.models.reward import JointRewardModel
from comlrl_nb.toy import micro_model, micro_tokenizer
from comlrl_nb.trainers.configs import MADPOConfig, MAGRPOConfig, MARLHFIterConfig
from comlrl_nb.trainers.preference import MARLHFConfig, MARLHFTrainer
from marlhf_runs import TOKENIZER, config, judge, letters, make, rows, same, text_pair, weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model with its tokenizer, so that only what is wrong stands between a call and the loading."""
    path = tmp_path_factory.mktemp("model")
    judge().save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return str(path)


@pytest.fixture
def no_loading(monkeypatch):
    """Loading, building or sampling from a model fails the test."""
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
    return Later(lambda: config(**wrong))


def changed(**wrong):
    """A right config, one field of which was overwritten afterwards."""
    args = config()
    for name, value in wrong.items():
        setattr(args, name, value)
    return args


def build(folder, **wrong):
    """A call that is right but for `wrong`."""
    call = dict(agent_model=folder, num_agents=2, reward_func=letters, train_dataset=rows(), callbacks=[], args=None if "args" in wrong else config())
    wrong = {name: value.make() if isinstance(value, Later) else value for name, value in wrong.items()}
    if "agents" in wrong:
        call.pop("agent_model"), call.pop("num_agents")
    return MARLHFTrainer(**{**call, **wrong})


class NoParser:
    def build_prompt(self, batch_item, agent_prompts):
        return "prompt"


ONE, TWO, JUDGE = micro_model(), micro_model(1), judge()
HEADLESS = CausalLMWithValueHead(micro_model(), attach_value_head=False)
SMALL = micro_model(vocab_size=100)
OBJECTS = dict(agents=[ONE, TWO], tokenizer=TOKENIZER)
JUDGED = dict(**OBJECTS, reward_model=JUDGE)
MAAC, IAC = dict(rl_algorithm="maac"), dict(rl_algorithm="iac")

WRONG = {
    # the configuration object
    "args is a dict": (dict(args={"num_agents": 2}), "args", "MARLHFConfig", "dict"),
    "args of MADPO": (dict(args=MADPOConfig()), "args", "MARLHFConfig", "MADPOConfig"),
    "args of a back end": (dict(args=MAGRPOConfig(num_turns=1)), "args", "MARLHFConfig", "MAGRPOConfig"),
    "args of the iterative trainer": (dict(args=MARLHFIterConfig()), "args", "MARLHFConfig", "MARLHFIterConfig"),
    "algorithm overwritten": (dict(args=changed(rl_algorithm="ppo")), "rl_algorithm", "'magrpo'", "ppo"),
    "temperature overwritten": (dict(args=changed(temperature=-1)), "temperature", "above 0", "-1"),
    # fields of the configuration
    "unknown algorithm": (dict(args=fields(rl_algorithm="ppo")), "rl_algorithm", "'iac'", "ppo"),
    "algorithm that is no word": (dict(args=fields(rl_algorithm=3)), "rl_algorithm", "'magrpo'", "3"),
    "one candidate": (dict(args=fields(preference_num_candidates=1)), "preference_num_candidates", "at least 2", "1"),
    "no pairs per item": (dict(args=fields(preference_pairs_per_sample=0)), "preference_pairs_per_sample", "at least 1", "0"),
    "all pairs and a limit": (dict(args=fields(pair_selection="all")), "preference_pairs_per_sample", "None", "2"),
    "selection of the iterative trainer": (dict(args=fields(pair_selection="comparator_reward")), "pair_selection", "'reward_gap'", "comparator_reward"),
    "one sample of a group": (dict(args=fields(num_generations=1)), "num_generations", "at least 2", "1"),
    "no sample of a critic's": (dict(args=fields(num_generations=0, **MAAC)), "num_generations", "at least 1", "0"),
    "two turns": (dict(args=fields(num_turns=2)), "num_turns", "1", "2"),
    "cross": (dict(args=fields(joint_mode="cross")), "joint_mode", "aligned", "cross"),
    "reward learning rate of zero": (dict(args=fields(reward_learning_rate=0)), "reward_learning_rate", "above 0", "0"),
    "reward epochs of zero": (dict(args=fields(reward_num_train_epochs=0)), "reward_num_train_epochs", "at least 1", "0"),
    "reward batch of zero": (dict(args=fields(reward_train_batch_size=0)), "reward_train_batch_size", "at least 1", "0"),
    "reward texts of no length": (dict(args=fields(reward_max_length=0)), "reward_max_length", "at least 1", "0"),
    "freezing in words": (dict(args=fields(reward_freeze_backbone="yes")), "reward_freeze_backbone", "True or False", "yes"),
    "everything held out": (dict(args=fields(reward_holdout=1.0)), "reward_holdout", "at most 0.9", "1.0"),
    "negative share": (dict(args=fields(reward_holdout=-0.1)), "reward_holdout", "at least 0", "-0.1"),
    "name of a judge that is none": (dict(args=fields(reward_model_name=3)), "reward_model_name", "str", "3"),
    "empty name of a judge": (dict(args=fields(reward_model_name="")), "reward_model_name", "''", "str"),
    "empty name of a critic": (dict(args=fields(critic_model_name="", **MAAC)), "critic_model_name", "''", "str"),
    "unknown kind of critic": (dict(args=fields(critic_type="a", **MAAC)), "critic_type", "'v'", "'a'"),
    "loss that weighs nothing": (dict(args=fields(value_loss_coef=0, **MAAC)), "value_loss_coef", "above 0", "0"),
    "critics that do not learn": (dict(args=fields(critic_learning_rate=0, **MAAC)), "critic_learning_rate", "above 0", "0"),
    "separate in words": (dict(args=fields(use_separate_critic="no", **IAC)), "use_separate_critic", "True or False", "no"),
    "clip of zero": (dict(args=fields(value_clip_range=0, **IAC)), "value_clip_range", "above 0", "0"),
    "discount above 1": (dict(args=fields(discount=1.5, **MAAC)), "discount", "at most 1", "1.5"),
    # devices
    "a judge on a device that is not here": (dict(args=fields(reward_model_device="cuda:63")), "reward_model_device", "cpu", "cuda:63"),
    "a judge on two devices": (dict(args=fields(reward_model_device=["cpu", "cpu"])), "reward_model_device", "one device", "cpu"),
    "a judge on no device": (dict(args=fields(reward_model_device="gpu0")), "reward_model_device", "one device name", "gpu0"),
    "mp without devices": (dict(args=fields(parallel_training="mp")), "agent_devices", "list", "mp"),
    "mp without devices, with a critic": (dict(args=fields(parallel_training="mp", **MAAC)), "agent_devices", "list", "mp"),
    "two devices of a shared critic": (dict(args=fields(critic_devices=["cpu", "cpu"], **MAAC)), "critic_devices", "1", "cpu"),
    "three devices of two critics": (dict(args=fields(parallel_training="mp", agent_devices="cpu", critic_devices=["cpu"] * 3, **IAC)), "critic_devices", "1 or 2", "cpu"),
    "a critic's device that is not here": (dict(args=fields(parallel_training="mp", agent_devices="cpu", critic_devices="cuda:63", **IAC)), "critic_devices", "cpu", "cuda:63"),
    "a reference's device that is not here": (dict(args=fields(reference_kl_enabled=True, reference_devices="cuda:63")), "reference_devices", "cpu", "cuda:63"),
    # the judge
    "objects without a name": (dict(**OBJECTS), "reward_model_name", "identifier", "reward_model="),
    "a judge twice": (dict(reward_model=JUDGE, args=fields(reward_model_name="some/model")), "reward_model", "one of them", "some/model"),
    "the actors and a name": (dict(reward_model="actors", args=fields(reward_model_name="some/model")), "reward_model", "one of them", "some/model"),
    "a judge's name in the wrong place": (dict(reward_model="some/model"), "reward_model", "reward_model_name", "some/model"),
    "a judge that is a number": (dict(reward_model=7), "reward_model", "JointRewardModel", "7"),
    "a judge that is a class": (dict(reward_model=JointRewardModel), "reward_model", "JointRewardModel", "class"),
    "a judge that is a function": (dict(reward_model=letters), "reward_model", "language model", "letters"),
    "a judge's name that does not exist": (dict(args=fields(reward_model_name="/no/such/judge")), "/no/such/judge", "loaded", "folder"),
    "a judge with too few embeddings": (dict(**OBJECTS, reward_model=SMALL), "reward_model", "100 embeddings", str(len(TOKENIZER))),
    "a whole judge with too few embeddings": (dict(**OBJECTS, reward_model=JointRewardModel(SMALL)), "reward_model", "100 embeddings", str(len(TOKENIZER))),
    # critics
    "critics for none": (dict(critics=[TWO]), "critics", "rl_algorithm='magrpo'", "'maac' or 'iac'"),
    "a critic for none": (dict(critic_model=TWO, args=fields(rl_algorithm="marloo")), "critic_model", "rl_algorithm='marloo'", "None"),
    "a critic's name for none": (dict(args=fields(critic_model_name="some/model")), "critic_model_name", "rl_algorithm='magrpo'", "None"),
    "no critic to be had": (dict(**JUDGED, args=fields(**MAAC)), "critic_model_name", "rl_algorithm='maac'", "critics"),
    "no critics to be had": (dict(**JUDGED, args=fields(**IAC)), "critic_model_name", "rl_algorithm='iac'", "critics"),
    "two critics of MAAC": (dict(critics=[ONE, TWO], args=fields(**MAAC)), "critics", "'maac' (1)", "2"),
    "one critic of two": (dict(critics=[ONE], args=fields(**IAC)), "critics", "'iac' (2)", "1"),
    "critics beside heads": (dict(critics=[ONE, TWO], args=fields(use_separate_critic=False, **IAC)), "critics", "use_separate_critic=False", "None"),
    "a critic beside heads": (dict(critic_model=ONE, args=fields(use_separate_critic=False, **IAC)), "critic", "use_separate_critic=False", "None"),
    "a critic that is a number": (dict(critic_model=3, args=fields(**MAAC)), "critic_model", "identifier", "3"),
    "None among critics": (dict(critics=[ONE, None], args=fields(**IAC)), "critics[1]", "identifier", "None"),
    "a critic without a head": (dict(critic_model=HEADLESS, args=fields(**MAAC)), "critic_model", "attach_value_head=True", "CausalLMWithValueHead"),
    "a critic that is an agent": (dict(**JUDGED, critics=[ONE], args=fields(**MAAC)), "critics[0]", "parameters of an agent", "copy"),
    "one of two critics that is an agent": (dict(**JUDGED, critics=[micro_model(5), TWO], args=fields(**IAC)), "critics[1]", "parameters of an agent", "use_separate_critic=False"),
    "a critic with too few embeddings": (dict(**JUDGED, critics=[SMALL], args=fields(**MAAC)), "critics[0]", "100 embeddings", str(len(TOKENIZER))),
    "a critic's name that does not exist": (dict(args=fields(critic_model_name="/no/such/critic", **MAAC)), "/no/such/critic", "loaded", "folder"),
    # how many agents, models, tokenizers
    "three and two": (dict(num_agents=3), "num_agents", "num_agents=3", "args.num_agents=2"),
    "no model": (dict(agent_model=None, reward_model=JUDGE), "agent_model", "None", "agents"),
    "agents as text": (dict(agents="some/model"), "agents", "list", "some/model"),
    "agents as a number": (dict(agents=3, reward_model=JUDGE), "agents", "list", "3"),
    "no agents in the list": (dict(agents=[], tokenizer=TOKENIZER, reward_model=JUDGE), "agents", "2", "0"),
    "None among agents": (dict(agents=[ONE, None], tokenizer=TOKENIZER, reward_model=JUDGE), "agents[1]", "model", "None"),
    "one frozen agent": (dict(agents=[ONE, micro_model().requires_grad_(False)], tokenizer=TOKENIZER, reward_model=JUDGE), "agents[1]", "requires a gradient", "LlamaForCausalLM"),
    "a name that does not exist": (dict(agent_model="/no/such/folder"), "/no/such/folder", "loaded", "folder"),
    "no tokenizer for objects": (dict(agents=[ONE, TWO], reward_model=JUDGE), "tokenizer", "must be given", "None"),
    "unknown key": (dict(model_config={"torch_type": "float32"}), "model_config", "torch_type", "torch_dtype"),
    "two central actors": (dict(**JUDGED, args=fields(collaboration_mode="centralized")), "agents", "1", "2"),
    # formatters, rewards, data, watching
    "one formatter too few": (dict(formatters=[str]), "formatters", "2 callables", "["),
    "no reward": (dict(reward_func=None), "reward_func", "function", "None"),
    "reward for four": (dict(reward_func=lambda a, b, c, d: 0.0), "reward_func", "2 agents", "'a', 'b', 'c', 'd'"),
    "processor that is a number": (dict(reward_processor=2.0), "reward_processor", "callable", "2.0"),
    "data as text": (dict(train_dataset="train.jsonl"), "train_dataset", "list of dicts", "str"),
    "logger alone": (dict(eval_logger=print), "eval_aggregator", "None", "eval_logger"),
    "a transition that is no function": (dict(external_transition=3), "external_transition", "callable", "3"),
    "adapter without parser": (dict(centralized_comparator_adapter=NoParser(), args=fields(collaboration_mode="centralized")), "adapter", "parse_completion", "NoParser"),
    "metrics_callback that is a number": (dict(metrics_callback=3), "metrics_callback", "callable", "3"),
    "wandb_config as text": (dict(wandb_config="my-project"), "wandb_config", "dictionary", "my-project"),
    "a callback outside a list": (dict(callbacks=Callback()), "callbacks", "list", "Callback"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_constructor_call(name, folder, no_loading):
    wrong, field, *fragments = WRONG[name]
    with pytest.raises(ValueError) as caught:
        build(folder, **wrong)
    message = str(caught.value)
    for fragment in (field, *fragments):
        assert fragment in message, f"{fragment!r} is not in: {message}"
    assert len(message) < 600


@pytest.mark.parametrize("algorithm", ["magrpo", "maac", "iac"])
def test_the_right_call_loads(folder, no_loading, algorithm):
    """The base of all calls is right: without a mistake the loading begins."""
    with pytest.raises(AssertionError, match="loaded"):
        build(folder, args=config(rl_algorithm=algorithm))
    if algorithm == "magrpo":
        with pytest.raises(AssertionError, match="loaded"):
            build(folder, **JUDGED)


def test_unknown_arguments_are_type_errors(folder, no_loading):
    with pytest.raises(TypeError, match="learning_rate"):
        build(folder, learning_rate=1.0)
    with pytest.raises(TypeError, match="reward_lr"):
        MARLHFConfig(reward_lr=4)


# what can be seen only when the models are there, but before a token is sampled

@pytest.fixture
def no_sampling(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a token was sampled")

    monkeypatch.setattr(GenerationMixin, "generate", refuse)


@pytest.mark.parametrize("length", [1, 71])
def test_no_room_beside_the_headings(folder, no_sampling, length):
    with pytest.raises(ValueError, match=f"reward_max_length={length}: the headings alone take 71 tokens"):
        build(folder, args=config(reward_max_length=length))
    with pytest.raises(ValueError, match=f"reward_max_length={length}"):
        make(reward_max_length=length)
    make(reward_max_length=72)


def test_a_judge_that_cannot_read_the_tokenizer_of_named_agents(folder, no_sampling):
    with pytest.raises(ValueError, match="reward_model has 100 embeddings"):
        build(folder, reward_model=SMALL)


def test_the_headings_of_a_central_actor_are_fewer(no_sampling):
    make([judge()], collaboration_mode="centralized", reward_max_length=50)


# wrong calls later on

def test_train_without_data():
    trainer = make(train_dataset=None)
    for _ in range(2):
        with pytest.raises(ValueError, match="train_dataset.*None.*list of dicts"):
            trainer.train()
    with pytest.raises(ValueError, match="train_dataset.*None.*list of dicts"):
        trainer.train_on([text_pair(("a", "b"), ("c", "d"), ("e", "f"))])
    assert trainer.reward_model is None and len(trainer.history) == 0  # the missing dataset is named before the fit
    assert trainer.rollout(rows()[0]) and trainer.collect(rows(1)) and trainer.fit([text_pair(("a", "b"), ("c", "d"), ("e", "f"))]) and trainer.step(rows(1))


@pytest.mark.parametrize("verb", ["fit", "train_on"])
@pytest.mark.parametrize("value, said", [("pairs", "list of PreferencePair.*str"), (None, "list of PreferencePair.*NoneType"), ([3], r"pairs\[0\].*int"), ([{"prompts": ["a"]}], r"pairs\[0\].*dict"),
                                         ([text_pair(("a",), ("b",), ("c",))], r"pairs\[0\].*1 actors.*has 2"),
                                         ([text_pair(("a", "b"), ("c", "d"), ("e", "f")), text_pair(("a",) * 3, ("b",) * 3, ("c",) * 3)], r"pairs\[1\].*3 actors.*has 2")])
def test_wrong_pairs(verb, value, said):
    trainer = make()
    with pytest.raises(ValueError, match=said):
        getattr(trainer, verb)(value)
    assert trainer.reward_model is None


def test_wrong_left_out_pairs():
    with pytest.raises(ValueError, match=r"pairs\[0\].*1 actors"):
        make().fit([text_pair(("a", "b"), ("c", "d"), ("e", "f"))], left_out=[text_pair(("a",), ("b",), ("c",))])


def test_no_pairs_to_fit():
    with pytest.raises(ValueError, match="pairs: none of 0"):
        make().fit([])


def test_items_given_by_hand_are_checked():
    trainer = make()
    trainer.fit([text_pair(("a", "b"), ("c", "d"), ("e", "f"))])
    for wrong in (["text"], [3], [rows()[0], None]):
        with pytest.raises(ValueError, match=r"items\[[01]\].*mapping"):
            trainer.step(wrong)
        with pytest.raises(ValueError, match=r"items\[[01]\].*mapping"):
            trainer.collect(wrong)
    assert trainer.run.update == 0


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "high", [1.0, 2.0], [], {"reward": 1.0}])
def test_a_reward_that_is_none(value):
    trainer = make(reward_func=lambda first, second: value)
    before = weights(trainer)
    with pytest.raises(ValueError, match="reward_func|<lambda>|reward"):
        trainer.train()
    assert same(before, weights(trainer)) and trainer.reward_model is None


def test_errors_of_the_reward_surface_unchanged():
    error = KeyError("gold")

    def broken(first, second):
        raise error

    with pytest.raises(KeyError) as caught:
        make(reward_func=broken).train()
    assert caught.value is error


@pytest.mark.parametrize("value", ["", None, 7])
def test_formatter_that_returns_no_text(value):
    trainer = make(formatters=[lambda item: "fine", lambda item: value])
    with pytest.raises(ValueError, match=rf"formatter of agent 1.*non-empty string.*{re.escape(repr(value))}"):
        trainer.train()


def test_a_metrics_callback_that_returns_no_mapping():
    with pytest.raises(ValueError, match="metrics_callback must return a dictionary"):
        make(rl_algorithm="maac", metrics_callback=lambda samples: 3).train()


def test_a_tokenizer_without_padding_gets_one_for_the_judge():
    tokenizer = micro_tokenizer()
    tokenizer.pad_token = None
    trainer = make(tokenizer=tokenizer)
    trainer.train()
    assert trainer.reward_model is not None


@pytest.mark.parametrize("count", [-1, True, 1.5, "3"])
def test_a_wrong_number_of_evaluation_samples(count):
    with pytest.raises(ValueError, match="num_eval_samples"):
        make(eval_dataset=rows(6)).evaluate(count)

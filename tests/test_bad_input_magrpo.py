"""Wrong constructor calls of the REINFORCE family: each names its field and what is allowed, before a model is loaded or a token sampled. Then wrong calls later on."""
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel

from comlrl_nb.callbacks import Callback
from comlrl_nb.toy import micro_model, micro_tokenizer
from comlrl_nb.trainers.configs import IACConfig, MADPOConfig
from comlrl_nb.trainers.reinforce import (CentralizedMAGRPOConfig, CentralizedMAGRPOTrainer, MAGRPOConfig, MAGRPOTrainer, MAREINFORCEConfig, MARLOOConfig, MARLOOTrainer,
                                          MAReMaxConfig)
from reinforce_runs import FAMILY, TOKENIZER, Halves, config, letters, make, onward, rows, same, team, weights


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

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for owner, name in ((AutoModelForCausalLM, "from_pretrained"), (AutoModelForCausalLM, "from_config"), (PreTrainedModel, "from_pretrained"), (GenerationMixin, "generate"),
                        (torch.nn.Module, "to"), (torch.nn.Module, "__deepcopy__")):
        monkeypatch.setattr(owner, name, refuse, raising=False)


class Later:
    """A value that is made inside the call."""

    def __init__(self, make):
        self.make = make


def fields(name="MAGRPO", **wrong):
    """A config with wrong fields, built in the call."""
    return Later(lambda: config(name, **wrong))


def changed(**wrong):
    """A right config, one field of which was overwritten afterwards."""
    args = config()
    for name, value in wrong.items():
        setattr(args, name, value)
    return args


def build(folder, trainer=MAGRPOTrainer, **wrong):
    """A call that is right but for `wrong`."""
    call = dict(agent_model=folder, num_agents=2, reward_func=letters, train_dataset=rows(), callbacks=[], args=None if "args" in wrong else config())
    wrong = {name: value.make() if isinstance(value, Later) else value for name, value in wrong.items()}
    if "agents" in wrong:
        call.pop("agent_model"), call.pop("num_agents")
    return trainer(**{**call, **wrong})


class Stream:
    def __iter__(self):
        return iter(rows())


class NoParser:
    def build_prompt(self, batch_item, agent_prompts):
        return "prompt"


async def later(first, second):
    return 1.0


def frozen():
    return micro_model().requires_grad_(False)


def toothless():
    tokenizer = micro_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    return tokenizer


ONE = micro_model()
CENTRAL = dict(trainer=CentralizedMAGRPOTrainer)

WRONG = {
    # the configuration object
    "args is a dict": (dict(args={"num_agents": 2}), "args", "MAGRPOConfig", "dict"),
    "args is a class": (dict(args=MAGRPOConfig), "args", "MAGRPOConfig", "type"),
    "args of another family": (dict(args=MADPOConfig()), "args", "MAGRPOConfig", "MADPOConfig"),
    "args of actor-critic": (dict(args=IACConfig()), "args", "MAGRPOConfig", "IACConfig"),
    "args of separate actors for a central one": (dict(args=fields(), **CENTRAL), "args", "CentralizedMAGRPOConfig", "MAGRPOConfig"),
    "args of a central actor for separate ones": (dict(args=CentralizedMAGRPOConfig()), "args", "MAGRPOConfig", "CentralizedMAGRPOConfig"),
    "temperature overwritten": (dict(args=changed(temperature=-1)), "temperature", "above 0", "-1"),
    "group size overwritten": (dict(args=changed(num_generations=1)), "num_generations", "at least 2", "1"),
    "turns overwritten": (dict(args=changed(num_turns=2)), "external_transition", "num_turns=2", "None"),
    # fields of the configuration
    "one sample": (dict(args=fields(num_generations=1)), "num_generations", "at least 2", "1"),
    "no samples": (dict(args=fields(num_generations=0)), "num_generations", "at least", "0"),
    "half a sample": (dict(args=fields(num_generations=2.5)), "num_generations", "integer", "2.5"),
    "a flag of samples": (dict(args=fields(num_generations=True)), "num_generations", "at least", "True"),
    "unknown joint mode": (dict(args=fields(joint_mode="diagonal")), "joint_mode", "'aligned', 'cross'", "diagonal"),
    "no joint mode": (dict(args=fields(joint_mode=None)), "joint_mode", "'aligned', 'cross'", "None"),
    "no turns": (dict(args=fields(num_turns=0)), "num_turns", "at least 1", "0"),
    "discount above 1": (dict(args=fields(discount=1.5)), "discount", "at most 1", "1.5"),
    "negative discount": (dict(args=fields(discount=-0.1)), "discount", "at least 0", "-0.1"),
    "discount that is none": (dict(args=fields(discount=float("nan"))), "discount", "finite", "nan"),
    "unknown baseline": (dict(args=fields(advantage_mode="median")), "advantage_mode", "'mean', 'raw', 'rloo', 'max'", "median"),
    "text for a flag": (dict(args=fields(advantage_normalization="False")), "advantage_normalization", "True or False", "'False'"),
    "passthrough in words": (dict(args=fields(external_prompt_passthrough="no")), "external_prompt_passthrough", "True or False", "no"),
    "threshold in words": (dict(args=fields(early_termination_threshold="high")), "early_termination_threshold", "None or a finite number", "high"),
    "infinite threshold": (dict(args=fields(early_termination_threshold=float("inf"))), "early_termination_threshold", "finite", "inf"),
    "empty buffer": (dict(args=fields(rollout_buffer_size=0)), "rollout_buffer_size", "at least 1", "0"),
    "batch of zero": (dict(args=fields(train_batch_size=0)), "train_batch_size", "at least 1", "0"),
    "no epochs": (dict(args=fields(num_train_epochs=0)), "num_train_epochs", "at least 1", "0"),
    "negative learning rate": (dict(args=fields(agent_learning_rate=-1e-5)), "agent_learning_rate", "at least 0", "-1e-05"),
    "logging never": (dict(args=fields(logging_steps=0)), "logging_steps", "at least 1", "0"),
    "no new tokens": (dict(args=fields(max_new_tokens=0)), "max_new_tokens", "at least 1", "0"),
    "temperature of zero": (dict(args=fields(temperature=0)), "temperature", "above 0", "0"),
    "top_p above 1": (dict(args=fields(top_p=1.5)), "top_p", "at most 1", "1.5"),
    "negative top_k": (dict(args=fields(top_k=-1)), "top_k", "at least 0", "-1"),
    "negative evaluation": (dict(args=fields(eval_interval=-1)), "eval_interval", "at least 0", "-1"),
    "evaluation batch of zero": (dict(args=fields(eval_batch_size=0)), "eval_batch_size", "at least 1", "0"),
    "penalty in words": (dict(args=fields(reference_kl_enabled="yes")), "reference_kl_enabled", "True or False", "yes"),
    "negative penalty": (dict(args=fields(reference_kl_coef=-0.1)), "reference_kl_coef", "at least 0", "-0.1"),
    "infinite penalty": (dict(args=fields(reference_kl_coef=float("inf"))), "reference_kl_coef", "finite", "inf"),
    "seed in words": (dict(args=fields(seed="zero")), "seed", "integer", "zero"),
    "shuffle in words": (dict(args=fields(shuffle="yes")), "shuffle", "True or False", "yes"),
    "skip misspelt": (dict(args=fields(on_nonfinite="ignore")), "on_nonfinite", "raise", "ignore"),
    "empty output folder": (dict(args=fields(output_dir="")), "output_dir", "path", "''"),
    "prompts of no length": (dict(args=fields(max_prompt_length=0)), "max_prompt_length", "at least 1", "0"),
    # turns
    "two turns without a transition": (dict(args=fields(num_turns=2)), "external_transition", "num_turns=2", "set num_turns=1"),
    "a transition that is text": (dict(args=fields(num_turns=2), external_transition="next"), "external_transition", "callable", "'next'"),
    "a transition that is a list": (dict(args=fields(num_turns=2), external_transition=[onward, onward]), "external_transition", "callable", "["),
    "a transition that is no function, in one turn": (dict(external_transition=3), "external_transition", "callable", "3"),
    "two turns of a central actor": (dict(args=fields("CentralizedMAGRPO", num_turns=2), external_transition=onward, **CENTRAL), "num_turns", "1 with a central actor", "2"),
    "a central actor that is none": (dict(args=fields("CentralizedMAGRPO", collaboration_mode="decentralized"), **CENTRAL), "collaboration_mode", "'centralized'", "decentralized"),
    # devices
    "unknown parallel mode": (dict(args=fields(parallel_training="ddp")), "parallel_training", "mp", "ddp"),
    "mp without devices": (dict(args=fields(parallel_training="mp")), "agent_devices", "list", "mp"),
    "mp with three devices": (dict(args=fields(parallel_training="mp", agent_devices=["cpu"] * 3)), "agent_devices", "1 or 2", "cpu"),
    "no device at all": (dict(args=fields(agent_devices=[])), "agent_devices", "device", "[]"),
    "a device that is not here": (dict(args=fields(agent_devices="cuda:63")), "agent_devices", "cpu", "cuda:63"),
    "one of two that is not here": (dict(args=fields(parallel_training="mp", agent_devices=["cpu", "cuda:63"])), "agent_devices[1]", "cpu", "cuda:63"),
    "three reference devices": (dict(args=fields(reference_kl_enabled=True, reference_devices=["cpu"] * 3)), "reference_devices", "1 or 2", "cpu"),
    "three reference devices without a penalty": (dict(args=fields(reference_devices=["cpu"] * 3)), "reference_devices", "1 or 2", "cpu"),
    "a reference device that is not here": (dict(args=fields(reference_kl_enabled=True, reference_devices="cuda:63")), "reference_devices", "cpu", "cuda:63"),
    "a reference device that is a number": (dict(args=fields(reference_kl_enabled=True, reference_devices=0)), "reference_devices", "device", "0"),
    "two reference devices of a central actor": (dict(args=fields("CentralizedMAGRPO", reference_kl_enabled=True, reference_devices=["cpu", "cpu"]), **CENTRAL), "reference_devices", "1", "cpu"),
    "one object on two devices": (dict(agents=[ONE, ONE], tokenizer=TOKENIZER, args=fields(parallel_training="mp", agent_devices=["cpu:0", "cpu:1"])), "agent_devices", "same object", "cpu:1"),
    # how many agents
    "no agents": (dict(num_agents=0), "num_agents", "at least 1", "0"),
    "a number in words": (dict(num_agents="2"), "num_agents", "at least 1", "'2'"),
    "three and two": (dict(num_agents=3), "num_agents", "num_agents=3", "args.num_agents=2"),
    "three objects, config says two": (dict(agents=[ONE] * 3, tokenizer=TOKENIZER), "num_agents", "len(agents)=3", "args.num_agents=2"),
    "two objects, constructor says three": (dict(agents=[ONE] * 2, num_agents=3, tokenizer=TOKENIZER, args=None), "num_agents", "len(agents)=2", "num_agents=3"),
    "two central actors": (dict(agents=[ONE] * 2, tokenizer=TOKENIZER, args=fields("CentralizedMAGRPO"), **CENTRAL), "agents", "1", "2"),
    # models and tokenizers
    "no model": (dict(agent_model=None), "agent_model", "None", "agents"),
    "empty name": (dict(agent_model=""), "agent_model", "identifier", "''"),
    "an object for two agents": (dict(agent_model=ONE, tokenizer=TOKENIZER), "agent_model", "agents", "LlamaForCausalLM"),
    "agents as text": (dict(agents="some/model"), "agents", "list", "some/model"),
    "no agents in the list": (dict(agents=[], tokenizer=TOKENIZER), "agents", "2", "0"),
    "None among agents": (dict(agents=[ONE, None], tokenizer=TOKENIZER), "agents[1]", "model", "None"),
    "names and objects": (dict(agents=["some/model", ONE], tokenizer=TOKENIZER), "agents", "mixture", "identifiers"),
    "another name": (dict(agent_model="a/model", agents=["b/model", "b/model"]), "agent_model", "a/model", "b/model"),
    "one frozen agent": (dict(agents=[ONE, frozen()], tokenizer=TOKENIZER), "agents[1]", "requires a gradient", "LlamaForCausalLM"),
    "a frozen central actor": (dict(agents=[frozen()], tokenizer=TOKENIZER, args=fields("CentralizedMAGRPO"), **CENTRAL), "agents[0]", "requires a gradient", "LlamaForCausalLM"),
    "vocabulary too small": (dict(agents=[ONE, micro_model(vocab_size=100)], tokenizer=TOKENIZER), "agents[1]", "100", str(len(TOKENIZER))),
    "a name that does not exist": (dict(agent_model="/no/such/folder"), "/no/such/folder", "loaded", "folder"),
    "no tokenizer for objects": (dict(agents=[ONE, ONE]), "tokenizer", "must be given", "None"),
    "three tokenizers": (dict(agents=[ONE, ONE], tokenizer=[TOKENIZER] * 3), "tokenizer", "2", "3"),
    "tokenizer without pad and end": (dict(agents=[ONE, ONE], tokenizer=toothless()), "pad_token", "eos_token", "None"),
    "unknown key": (dict(model_config={"torch_type": "float32"}), "model_config", "torch_type", "torch_dtype"),
    # formatters and rewards
    "one formatter too few": (dict(formatters=[str]), "formatters", "2 callables", "["),
    "formatters as text": (dict(formatters="{prompt}"), "formatters", "callable", "{prompt}"),
    "no reward": (dict(reward_func=None), "reward_func", "function", "None"),
    "reward as a number": (dict(reward_func=1.0), "reward_func", "callable", "1.0"),
    "a coroutine": (dict(reward_func=later), "reward_func", "plain callable", "later"),
    "reward for four": (dict(reward_func=lambda a, b, c, d: 0.0), "reward_func", "2 agents", "'a', 'b', 'c', 'd'"),
    "reward with an unknown keyword": (dict(reward_func=lambda first, second, *, gold: 0.0), "reward_func", "gold", "answer"),
    "processor that is a number": (dict(reward_processor=2.0), "reward_processor", "callable", "2.0"),
    # data, evaluation, watching
    "data as text": (dict(train_dataset="train.jsonl"), "train_dataset", "list of dicts", "str"),
    "rows of text": (dict(train_dataset=[{"prompt": "a"}, "b"]), "train_dataset[1]", "mapping", "str"),
    "held-out data as a number": (dict(eval_dataset=3), "eval_dataset", "list of dicts", "int"),
    "a stream that cannot be shuffled": (dict(train_dataset=Stream(), args=fields(shuffle=True)), "train_dataset", "shuffle", "length"),
    "logger alone": (dict(eval_logger=print), "eval_aggregator", "None", "eval_logger"),
    "aggregator that is no function": (dict(eval_logger=print, eval_aggregator=1), "eval_aggregator", "callable", "1"),
    "adapter as text": (dict(centralized_adapter="tagged", args=fields("CentralizedMAGRPO"), **CENTRAL), "adapter", "build_prompt", "tagged"),
    "adapter without parser": (dict(centralized_adapter=NoParser(), args=fields("CentralizedMAGRPO"), **CENTRAL), "adapter", "parse_completion", "NoParser"),
    "wandb_config as text": (dict(wandb_config="my-project"), "wandb_config", "dictionary", "my-project"),
    "a callback outside a list": (dict(callbacks=Callback()), "callbacks", "list", "Callback"),
    "a callback that is a function": (dict(callbacks=[print]), "callbacks", "Callback", "print"),
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


def test_the_right_call_loads(folder, no_loading):
    """The base of all calls is right: without a mistake the loading begins."""
    for trainer, args in ((MAGRPOTrainer, config()), (MARLOOTrainer, config("MARLOO")), (CentralizedMAGRPOTrainer, config("CentralizedMAGRPO"))):
        with pytest.raises(AssertionError, match="loaded"):
            build(folder, trainer=trainer, args=args)


@pytest.mark.parametrize("name", [*FAMILY, "CentralizedMAGRPO"])
@pytest.mark.parametrize("wrong", [dict(num_generations=1), dict(joint_mode="all"), dict(num_turns=0), dict(discount=2), dict(advantage_mode="none"), dict(rollout_buffer_size=0),
                                   dict(reference_kl_coef=-1), dict(reference_devices=[]), dict(agent_devices=[])])
def test_every_configuration_names_itself_and_the_field(name, wrong):
    (field, value), = wrong.items()
    with pytest.raises(ValueError, match=re.escape(f"{field} must be")) as caught:
        config(name, **wrong)
    assert f"{name}Config" in str(caught.value) and f"got {value!r}" in str(caught.value)


def test_unknown_arguments_are_type_errors(folder, no_loading):
    for trainer in (MAGRPOTrainer, CentralizedMAGRPOTrainer):
        with pytest.raises(TypeError, match="learning_rate"):
            build(folder, trainer=trainer, learning_rate=1.0)
    with pytest.raises(TypeError, match="num_generation"):
        MAGRPOConfig(num_generation=4)


def test_the_central_trainers_own_argument_is_named():
    with pytest.raises(ValueError, match="^centralized_adapter.*parse_completion"):
        make(name="CentralizedMAGRPO", centralized_adapter=NoParser())


# drop-in: configurations that comlrl takes

@pytest.mark.parametrize("given", [MARLOOConfig, MAREINFORCEConfig, MAReMaxConfig])
def test_a_trainer_takes_its_sisters_configuration(given):
    """comlrl does; the field `advantage_mode` says which baseline is meant."""
    args = given(num_agents=2, num_turns=1)
    assert make(args=args).rule.mode == args.advantage_mode


def test_the_sisters_take_the_parents_configuration():
    assert make(name="MARLOO", args=MAGRPOConfig(num_agents=2, num_turns=1, advantage_mode="rloo")).rule.mode == "rloo"


def test_a_central_actor_without_args_writes_for_two():
    trainer = CentralizedMAGRPOTrainer(centralized_adapter=Halves(), agents=team(("gpt2",)), tokenizer=TOKENIZER, reward_func=letters, callbacks=[])
    assert trainer.args.num_agents == 2 and trainer.num_agents == 1


def test_a_central_actor_with_a_number_of_roles_and_without_args():
    trainer = CentralizedMAGRPOTrainer(centralized_adapter=Halves(), num_agents=3, agents=team(("gpt2",)), tokenizer=TOKENIZER, reward_func=letters, callbacks=[])
    assert trainer.args.num_agents == 3


# wrong calls later on

@pytest.mark.parametrize("name", [*FAMILY, "CentralizedMAGRPO"])
def test_train_without_data(name):
    trainer = make(name=name, train_dataset=None)
    for _ in range(2):
        with pytest.raises(ValueError, match="train_dataset.*None.*list of dicts"):
            trainer.train()
    with pytest.raises(ValueError, match="train_dataset.*no rows"):
        make(name=name, train_dataset=[]).train()
    assert trainer.rollout(rows()[0]) and trainer.step(rows(1))  # rows given by hand need no dataset


def test_rows_that_turn_out_wrong():
    class Odd:
        def __iter__(self):
            return iter([{"prompt": "a"}, {"prompt": "b"}, ["c"]])

    with pytest.raises(ValueError, match=r"train_dataset\[2\].*mapping.*list"):
        make(train_dataset=Odd()).train()


def test_items_given_by_hand_are_checked():
    trainer = make()
    for wrong in (["text"], [3], [rows()[0], None]):
        with pytest.raises(ValueError, match=r"items\[[01]\].*mapping"):
            trainer.step(wrong)
    for wrong in ("text", 3, None):
        with pytest.raises(ValueError, match="item.*mapping"):
            trainer.rollout(wrong)
    assert trainer.run.update == 0


@pytest.mark.parametrize("value", ["", None, 7, ["list"], b"bytes"])
@pytest.mark.parametrize("agent", [0, 1])
@pytest.mark.parametrize("turn", [1, 2])
def test_formatter_that_returns_no_text(value, agent, turn):
    pair = [lambda item, external_prompts=None: "fine"] * 2
    pair[agent] = lambda item, external_prompts=None: value if turn == (1 if external_prompts is None else 2) else "fine"
    trainer = make(formatters=pair, num_turns=2, num_generations=2)
    before = weights(trainer)
    with pytest.raises(ValueError, match=rf"formatter of agent {agent}.*non-empty string.*{re.escape(repr(value))}"):
        trainer.train()
    assert same(before, weights(trainer)) and trainer.env_step == 0


def test_items_without_a_prompt():
    with pytest.raises(ValueError, match="prompt.*question.*formatters"):
        make(train_dataset=[{"question": "a"}]).train()


class Adapter:
    """Returns what it is told."""

    def __init__(self, parts, prompt="write"):
        self.parts, self.prompt = parts, prompt

    def build_prompt(self, batch_item, agent_prompts):
        return self.prompt

    def parse_completion(self, completion, batch_item, num_agents):
        return self.parts


@pytest.mark.parametrize("parts, said", [(["a"], "2 texts.*got 1"), (["a", "b", "c"], "2 texts.*got 3"), ([], "2 texts.*got 0"), ("ab", "one string per role.*'ab'"),
                                         (["a", None], "one string per role.*None"), (None, "one string per role.*None"), ({"a": 1, "b": 2}, "one string per role")])
def test_adapter_with_wrong_parts(parts, said):
    trainer = make(name="CentralizedMAGRPO", centralized_adapter=Adapter(parts))
    before = weights(trainer)
    with pytest.raises(ValueError, match=f"Adapter.parse_completion.*{said}"):
        trainer.train()
    assert same(before, weights(trainer))


@pytest.mark.parametrize("prompt", ["", None, 3, "  "])
def test_adapter_without_a_prompt(prompt):
    with pytest.raises(ValueError, match="Adapter.build_prompt.*non-empty.*got"):
        make(name="CentralizedMAGRPO", centralized_adapter=Adapter(["a", "b"], prompt)).train()


def test_texts_that_cannot_be_split_are_empty_and_counted():
    read = []
    trainer = make(team(("gpt2",), n_positions=1024), name="CentralizedMAGRPO", reward_func=lambda first, second: read.append((first, second)) or 0.0)
    trainer.train()
    assert set(map(str, read)) == {"([''], [''])"} and trainer.history.rows[0]["unsplit_fraction"] == 1.0


GENERATED = {
    "too few rows": lambda ids, num: ids.repeat_interleave(num, 0)[:-1],
    "too many rows": lambda ids, num: ids.repeat_interleave(num + 1, 0),
    "one dimension": lambda ids, num: ids[0],
    "no prompt": lambda ids, num: torch.ones(len(ids) * num, 3, dtype=torch.long),
    "another prompt": lambda ids, num: ids.repeat_interleave(num, 0) + 1,
    "shorter than the prompt": lambda ids, num: ids.repeat_interleave(num, 0)[:, :-1],
}


@pytest.mark.parametrize("how", GENERATED)
def test_generate_that_returns_wrong_rows(how):
    trainer = make()
    trainer.agents[1].generate = lambda input_ids, attention_mask, num_return_sequences, **keywords: GENERATED[how](input_ids, num_return_sequences)
    before = weights(trainer)
    with pytest.raises(ValueError, match="generate (returned|must return)"):
        trainer.train()
    assert same(before, weights(trainer)) and trainer.env_step == 0


def test_errors_of_generate_surface_and_leave_the_settings():
    trainer, error = make(), RuntimeError("out of memory")
    kept = [model.generation_config for model in trainer.agents]
    trainer.agents[1].train()

    def generate(**keywords):
        raise error

    trainer.agents[1].generate = generate
    with pytest.raises(RuntimeError) as caught:
        trainer.train()
    assert caught.value is error and trainer.agents[1].training and all(model.generation_config is one for model, one in zip(trainer.agents, kept))


def test_a_prompt_longer_than_the_model_in_the_second_turn():
    trainer = make(team(("gpt2", "gpt2"), n_positions=16), external_transition=lambda **given: ["a prompt of more than sixteen tokens"] * 2, num_turns=2)
    before = weights(trainer)
    with pytest.raises(ValueError, match="agent 0.*max_prompt_length"):
        trainer.train()
    assert same(before, weights(trainer)) and trainer.env_step == 0


@pytest.mark.parametrize("function, wrong", [(lambda prompt: ["a", "b"], "agent_completions"), (lambda a, b, c, d, e: ["a", "b"], "prompt|agent_completions|missing")])
def test_a_transition_with_another_signature_is_a_type_error(function, wrong):
    with pytest.raises(TypeError, match=wrong):
        make(external_transition=function, num_turns=2, num_generations=2).train()


def test_column_that_a_row_lacks():
    with pytest.raises(ValueError, match="reward_func.*'answer'"):
        make(train_dataset=[{"prompt": "a", "answer": 1}, {"prompt": "b"}], reward_func=lambda first, second, answer: 0.0).train()


def test_eval_aggregator_that_returns_no_mapping():
    with pytest.raises(ValueError, match="eval_aggregator"):
        make(eval_dataset=rows(1), eval_logger=lambda **given: [], eval_aggregator=lambda details, num_turns: 3).evaluate()


@pytest.mark.parametrize("count", [-1, True, 1.5, "3"])
def test_a_wrong_number_of_evaluation_samples(count):
    with pytest.raises(ValueError, match="num_eval_samples"):
        make(eval_dataset=rows(6)).evaluate(count)

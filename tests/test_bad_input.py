"""Wrong constructor calls: each names its field and what is allowed, before a model is loaded or a token sampled. Then wrong calls later on."""
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel

from comlrl_nb.callbacks import Callback
from comlrl_nb.toy import micro_model, micro_tokenizer
from comlrl_nb.trainers.configs import IACConfig, MADPOIterConfig, MAGRPOConfig, MARLHFConfig
from comlrl_nb.trainers.preference import MADPOConfig, MADPOTrainer
from madpo_runs import TOKENIZER, config, letters, make, rows, same, team, weights


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


def build(folder, **wrong):
    """A call that is right but for `wrong`."""
    call = dict(agent_model=folder, num_agents=2, reward_func=letters, train_dataset=rows(), callbacks=[])
    wrong = {name: value() if isinstance(value, Later) else value for name, value in wrong.items()}
    if "agents" in wrong:
        call.pop("agent_model"), call.pop("num_agents")
    return MADPOTrainer(**{**call, "args": None, **wrong} if "args" in wrong else {**call, "args": config(), **wrong})


class Later:
    """A value that is made inside the call."""

    def __init__(self, make):
        self.make = make

    def __call__(self):
        return self.make()


def fields(**wrong):
    """A config with wrong fields, built in the call."""
    return Later(lambda: config(**wrong))


def changed(**wrong):
    """A right config, one field of which was overwritten afterwards."""
    args = config()
    for name, value in wrong.items():
        setattr(args, name, value)
    return args


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
CENTRAL = dict(args=fields(collaboration_mode="centralized"))
AGENTS = lambda: team(("gpt2", "gpt2"))

WRONG = {
    # the configuration object
    "args is a dict": (dict(args={"num_agents": 2}), "args", "MADPOConfig", "dict"),
    "args is a class": (dict(args=MADPOConfig), "args", "MADPOConfig", "type"),
    "args of another family": (dict(args=MAGRPOConfig()), "args", "MADPOConfig", "MAGRPOConfig"),
    "args of actor-critic": (dict(args=IACConfig()), "args", "MADPOConfig", "IACConfig"),
    "args of the reward-model trainer": (dict(args=MARLHFConfig()), "args", "MADPOConfig", "MARLHFConfig"),
    "args of the iterative trainer": (dict(args=MADPOIterConfig()), "args", "MADPOConfig", "MADPOIterConfig"),
    "temperature overwritten": (dict(args=changed(temperature=-1)), "temperature", "above 0", "-1"),
    "num_turns overwritten": (dict(args=changed(num_turns=2)), "num_turns", "1", "2"),
    "candidates overwritten": (dict(args=changed(preference_num_candidates=1)), "preference_num_candidates", "at least 2", "1"),
    # fields of the configuration
    "two turns": (dict(args=fields(num_turns=2)), "num_turns", "1", "2"),
    "cross": (dict(args=fields(joint_mode="cross")), "joint_mode", "aligned", "cross"),
    "one candidate": (dict(args=fields(preference_num_candidates=1)), "preference_num_candidates", "at least 2", "1"),
    "no pairs": (dict(args=fields(preference_pairs_per_sample=0)), "preference_pairs_per_sample", "at least 1", "0"),
    "limit with all": (dict(args=fields(pair_selection="all", preference_pairs_per_sample=3)), "preference_pairs_per_sample", "None", "3"),
    "unknown selection": (dict(args=fields(pair_selection="best")), "pair_selection", "reward_gap", "best"),
    "comparator selection": (dict(args=fields(pair_selection="comparator_reward")), "pair_selection", "reward_gap", "comparator_reward"),
    "beta of zero": (dict(args=fields(dpo_beta=0)), "dpo_beta", "above 0", "0"),
    "negative learning rate": (dict(args=fields(agent_learning_rate=-1e-5)), "agent_learning_rate", "at least 0", "-1e-05"),
    "batch of zero": (dict(args=fields(train_batch_size=0)), "train_batch_size", "at least 1", "0"),
    "no epochs": (dict(args=fields(num_train_epochs=0)), "num_train_epochs", "at least 1", "0"),
    "no new tokens": (dict(args=fields(max_new_tokens=0)), "max_new_tokens", "at least 1", "0"),
    "top_p above 1": (dict(args=fields(top_p=1.5)), "top_p", "at most 1", "1.5"),
    "negative top_k": (dict(args=fields(top_k=-1)), "top_k", "at least 0", "-1"),
    "text for a flag": (dict(args=fields(dpo_reference="False")), "dpo_reference", "True or False", "'False'"),
    "seed in words": (dict(args=fields(seed="zero")), "seed", "integer", "zero"),
    "skip misspelt": (dict(args=fields(on_nonfinite="ignore")), "on_nonfinite", "raise", "ignore"),
    "empty output folder": (dict(args=fields(output_dir="")), "output_dir", "path", "''"),
    "last token of a central actor": (dict(args=fields(collaboration_mode="centralized", score_last_token=True)), "score_last_token", "False", "centralized"),
    "unknown collaboration": (dict(args=fields(collaboration_mode="both")), "collaboration_mode", "centralized", "both"),
    # devices
    "unknown parallel mode": (dict(args=fields(parallel_training="ddp")), "parallel_training", "mp", "ddp"),
    "mp without devices": (dict(args=fields(parallel_training="mp")), "agent_devices", "list", "mp"),
    "mp with three devices": (dict(args=fields(parallel_training="mp", agent_devices=["cpu"] * 3)), "agent_devices", "1 or 2", "cpu"),
    "no device at all": (dict(args=fields(agent_devices=[])), "agent_devices", "device", "[]"),
    "a device that is a number": (dict(args=fields(agent_devices=3)), "agent_devices", "device", "3"),
    "a device name that is none": (dict(args=fields(agent_devices="gpu")), "agent_devices", "device", "gpu"),
    "empty device name": (dict(args=fields(agent_devices="")), "agent_devices", "device", "''"),
    "a device that is not here": (dict(args=fields(agent_devices="cuda:63")), "agent_devices", "cpu", "cuda:63"),
    "one of two that is not here": (dict(args=fields(parallel_training="mp", agent_devices=["cpu", "cuda:63"])), "agent_devices[1]", "cpu", "cuda:63"),
    "three reference devices": (dict(args=fields(dpo_reference=True, reference_devices=["cpu"] * 3)), "reference_devices", "1 or 2", "cpu"),
    "a reference device that is not here": (dict(args=fields(dpo_reference=True, reference_devices="cuda:63")), "reference_devices", "cpu", "cuda:63"),
    "one object on two devices": (dict(agents=[ONE, ONE], tokenizer=TOKENIZER, args=fields(parallel_training="mp", agent_devices=["cpu:0", "cpu:1"])),
                                  "agent_devices", "same object", "cpu:1"),
    # how many agents
    "no agents": (dict(num_agents=0), "num_agents", "at least 1", "0"),
    "a flag for a number": (dict(num_agents=True), "num_agents", "at least 1", "True"),
    "a number in words": (dict(num_agents="2"), "num_agents", "at least 1", "'2'"),
    "half an agent": (dict(num_agents=2.5), "num_agents", "at least 1", "2.5"),
    "three and two": (dict(num_agents=3), "num_agents", "num_agents=3", "args.num_agents=2"),
    "three objects, config says two": (dict(agents=[ONE] * 3, tokenizer=TOKENIZER), "num_agents", "len(agents)=3", "args.num_agents=2"),
    "two objects, constructor says three": (dict(agents=[ONE] * 2, num_agents=3, tokenizer=TOKENIZER, args=None), "num_agents", "len(agents)=2", "num_agents=3"),
    "two central actors": (dict(agents=[ONE] * 2, tokenizer=TOKENIZER, **CENTRAL), "agents", "1", "2"),
    # models
    "no model": (dict(agent_model=None), "agent_model", "None", "agents"),
    "empty name": (dict(agent_model=""), "agent_model", "identifier", "''"),
    "an empty name in the list": (dict(agents=["some/model", ""]), "agents[1]", "identifier", "''"),
    "a model that is a number": (dict(agent_model=5), "agent_model", "identifier", "5"),
    "an object for two agents": (dict(agent_model=ONE, tokenizer=TOKENIZER), "agent_model", "agents", "LlamaForCausalLM"),
    "agents as text": (dict(agents="some/model"), "agents", "list", "some/model"),
    "agents from a generator": (dict(agents=(model for model in [ONE])), "agents", "list", "generator"),
    "agents as a set": (dict(agents={ONE}, tokenizer=TOKENIZER), "agents", "list", "{"),
    "no agents in the list": (dict(agents=[], tokenizer=TOKENIZER), "agents", "2", "0"),
    "None among agents": (dict(agents=[ONE, None], tokenizer=TOKENIZER), "agents[1]", "model", "None"),
    "a class among agents": (dict(agents=[ONE, type(ONE)], tokenizer=TOKENIZER), "agents[1]", "model", "class"),
    "names and objects": (dict(agents=["some/model", ONE], tokenizer=TOKENIZER), "agents", "mixture", "identifiers"),
    "another name": (dict(agent_model="a/model", agents=["b/model", "b/model"]), "agent_model", "a/model", "b/model"),
    "frozen model": (dict(agents=[ONE, frozen()], tokenizer=TOKENIZER), "agents[1]", "requires a gradient", "LlamaForCausalLM"),
    "vocabulary too small": (dict(agents=[ONE, micro_model(vocab_size=100)], tokenizer=TOKENIZER), "agents[1]", "100", str(len(TOKENIZER))),
    "a name that does not exist": (dict(agent_model="/no/such/folder"), "/no/such/folder", "loaded", "folder"),
    # tokenizers
    "no tokenizer for objects": (dict(agents=[ONE, ONE]), "tokenizer", "must be given", "None"),
    "tokenizer by name": (dict(agents=[ONE, ONE], tokenizer="gpt2"), "tokenizer", "object", "gpt2"),
    "three tokenizers": (dict(agents=[ONE, ONE], tokenizer=[TOKENIZER] * 3), "tokenizer", "2", "3"),
    "no tokenizers": (dict(tokenizer=[]), "tokenizer", "one", "0"),
    "None among tokenizers": (dict(agents=[ONE, ONE], tokenizer=[TOKENIZER, None]), "tokenizer", "None", "object"),
    "tokenizer without pad and end": (dict(agents=[ONE, ONE], tokenizer=toothless()), "pad_token", "eos_token", "None"),
    # model_config
    "model_config as text": (dict(model_config="bf16"), "model_config", "dictionary", "bf16"),
    "unknown key": (dict(model_config={"torch_type": "float32"}), "model_config", "torch_type", "torch_dtype"),
    "unknown dtype": (dict(model_config={"dtype": "float31"}), "model_config", "float31", "bfloat16"),
    "empty dtype": (dict(model_config={"dtype": ""}), "model_config", "''", "bfloat16"),
    "device_map": (dict(model_config={"model_kwargs": {"device_map": "auto"}}), "device_map", "device fields", "auto"),
    # formatters
    "one formatter too few": (dict(formatters=[str]), "formatters", "2 callables", "["),
    "one formatter too many": (dict(formatters=[str] * 3), "formatters", "2 callables", "["),
    "formatters as text": (dict(formatters="{prompt}"), "formatters", "callable", "{prompt}"),
    "formatters as a dict": (dict(formatters={0: str, 1: str}), "formatters", "callable", "{"),
    "a formatter that is none": (dict(formatters=[str, None]), "formatters", "callables", "None"),
    # rewards
    "no reward": (dict(reward_func=None), "reward_func", "function", "None"),
    "reward as a number": (dict(reward_func=1.0), "reward_func", "callable", "1.0"),
    "two rewards": (dict(reward_func=[letters, letters]), "reward_func", "callable", "["),
    "a coroutine": (dict(reward_func=later), "reward_func", "plain callable", "later"),
    "reward for four": (dict(reward_func=lambda a, b, c, d: 0.0), "reward_func", "2 agents", "'a', 'b', 'c', 'd'"),
    "reward that takes nothing": (dict(reward_func=lambda: 0.0), "reward_func", "2 agents", "()"),
    "reward with an unknown keyword": (dict(reward_func=lambda first, second, *, gold: 0.0), "reward_func", "gold", "answer"),
    "processor that is a number": (dict(reward_processor=2.0), "reward_processor", "callable", "2.0"),
    # data
    "data as text": (dict(train_dataset="train.jsonl"), "train_dataset", "list of dicts", "str"),
    "data as one dict": (dict(train_dataset={"prompt": ["a", "b"]}), "train_dataset", "list of dicts", "dict"),
    "data as a number": (dict(train_dataset=3), "train_dataset", "list of dicts", "int"),
    "rows of text": (dict(train_dataset=[{"prompt": "a"}, "b"]), "train_dataset[1]", "mapping", "str"),
    "held-out data as text": (dict(eval_dataset="eval.jsonl"), "eval_dataset", "list of dicts", "str"),
    "held-out rows of text": (dict(eval_dataset=["a"]), "eval_dataset[0]", "mapping", "str"),
    "a stream that cannot be shuffled": (dict(train_dataset=Stream(), args=fields(shuffle=True)), "train_dataset", "shuffle", "length"),
    # evaluation, roles, watching
    "logger alone": (dict(eval_logger=print), "eval_aggregator", "None", "eval_logger"),
    "aggregator alone": (dict(eval_aggregator=print), "eval_logger", "None", "eval_aggregator"),
    "logger that is no function": (dict(eval_logger="log", eval_aggregator=print), "eval_logger", "callable", "'log'"),
    "aggregator that is no function": (dict(eval_logger=print, eval_aggregator=1), "eval_aggregator", "callable", "1"),
    "transition that is no function": (dict(external_transition="next"), "external_transition", "callable", "'next'"),
    "adapter without parser": (dict(centralized_comparator_adapter=NoParser(), **CENTRAL), "centralized_comparator_adapter", "parse_completion", "NoParser"),
    "adapter as text": (dict(centralized_comparator_adapter="tagged", **CENTRAL), "centralized_comparator_adapter", "build_prompt", "tagged"),
    "adapter without parser, separate agents": (dict(centralized_comparator_adapter=NoParser()), "centralized_comparator_adapter", "parse_completion", "NoParser"),
    "wandb_config as text": (dict(wandb_config="my-project"), "wandb_config", "dictionary", "my-project"),
    "wandb_config as a flag": (dict(wandb_config=True), "wandb_config", "dictionary", "True"),
    "callbacks as a number": (dict(callbacks=3), "callbacks", "Callback", "3"),
    "a callback outside a list": (dict(callbacks=Callback()), "callbacks", "list", "Callback"),
    "a callback that is a function": (dict(callbacks=[print]), "callbacks", "Callback", "print"),
    "a callback class": (dict(callbacks=[Callback]), "callbacks", "Callback", "class"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_constructor_call(name, folder, no_loading, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    wrong, field, *fragments = WRONG[name]
    with pytest.raises(ValueError) as caught:
        build(folder, **wrong)
    message = str(caught.value)
    for fragment in (field, *fragments):
        assert fragment in message, f"{fragment!r} is not in: {message}"
    assert len(message) < 600


def test_there_are_enough_of_them():
    assert len(WRONG) >= 45


def test_the_right_call_loads(folder, no_loading):
    """The base of all calls is right: without a mistake the loading begins."""
    with pytest.raises(AssertionError, match="loaded"):
        build(folder)


def test_unknown_arguments_are_type_errors(folder, no_loading):
    with pytest.raises(TypeError, match="learning_rate"):
        build(folder, learning_rate=1.0)
    with pytest.raises(TypeError, match="dpo_bet"):
        MADPOConfig(dpo_bet=1.0)


# wrong calls later on

def test_train_without_data():
    trainer = make(train_dataset=None)
    with pytest.raises(ValueError, match="train_dataset.*None"):
        trainer.train()
    for empty in ([], ()):
        with pytest.raises(ValueError, match="train_dataset.*no rows"):
            make(train_dataset=empty).train()
    assert trainer.collect(rows(1))  # rows given by hand need no dataset


def test_rows_that_turn_out_wrong():
    class Odd:
        def __iter__(self):
            return iter([{"prompt": "a"}, {"prompt": "b"}, ["c"]])

    with pytest.raises(ValueError, match=r"train_dataset\[2\].*mapping.*list"):
        make(train_dataset=Odd()).train()


def test_items_given_by_hand_are_checked():
    for wrong in (["text"], [3]):
        with pytest.raises(ValueError, match="mapping"):
            make().collect(wrong)
    with pytest.raises(ValueError, match="mapping"):
        make().rollout("text")


@pytest.mark.parametrize("value", ["", None, 7, ["list"], b"bytes"])
@pytest.mark.parametrize("agent", [0, 1])
def test_formatter_that_returns_no_text(value, agent):
    pair = [lambda item: "fine", lambda item: "fine"]
    pair[agent] = lambda item: value
    trainer = make(formatters=pair)
    for model in trainer.agents:
        model.generate = None  # nothing may be sampled
    with pytest.raises(ValueError, match=rf"formatter of agent {agent}.*non-empty string.*{re.escape(repr(value))}"):
        trainer.train()


def test_items_without_a_prompt():
    with pytest.raises(ValueError, match="prompt.*question.*formatters"):
        make(train_dataset=[{"question": "a"}]).train()


def test_errors_inside_a_formatter_surface_unchanged():
    error = KeyError("gold")

    def formatter(item):
        raise error

    with pytest.raises(KeyError) as caught:
        make(formatters=formatter).train()
    assert caught.value is error


class Adapter:
    """Returns what it is told."""

    def __init__(self, parts, prompt="write"):
        self.parts, self.prompt = parts, prompt

    def build_prompt(self, batch_item, agent_prompts):
        return self.prompt

    def parse_completion(self, completion, batch_item, num_agents):
        return self.parts


def central(adapter):
    return make(team(("gpt2",)), collaboration_mode="centralized", centralized_comparator_adapter=adapter)


@pytest.mark.parametrize("parts, said", [(["a"], "2 texts.*got 1"), (["a", "b", "c"], "2 texts.*got 3"), ([], "2 texts.*got 0"), ("ab", "one string per role.*'ab'"),
                                         (["a", None], "one string per role.*None"), (None, "one string per role.*None"), ({"a": 1, "b": 2}, "one string per role")])
def test_adapter_with_wrong_parts(parts, said):
    trainer = central(Adapter(parts))
    before = weights(trainer)
    with pytest.raises(ValueError, match=f"Adapter.parse_completion.*{said}"):
        trainer.train()
    assert same(before, weights(trainer))


@pytest.mark.parametrize("prompt", ["", None, 3, "  "])
def test_adapter_without_a_prompt(prompt):
    with pytest.raises(ValueError, match="Adapter.build_prompt.*non-empty.*got"):
        central(Adapter(["a", "b"], prompt)).train()


def test_texts_that_cannot_be_split_are_empty_and_counted():
    read = []
    trainer = make(team(("gpt2",), n_positions=1024), collaboration_mode="centralized", reward_func=lambda first, second: read.append((first, second)) or 0.0)
    trainer.train()
    assert set(map(str, read)) == {"([''], [''])"} and trainer.history.rows[0]["unsplit_fraction"] == 1.0


GENERATED = {
    "too few rows": lambda ids, num: ids.repeat_interleave(num, 0)[:-1],
    "too many rows": lambda ids, num: ids.repeat_interleave(num + 1, 0),
    "one dimension": lambda ids, num: ids[0],
    "no prompt": lambda ids, num: torch.ones(len(ids) * num, 3, dtype=torch.long),
    "another prompt": lambda ids, num: ids.repeat_interleave(num, 0) + 1,
    "samples of the prompts in another order": lambda ids, num: ids.repeat(num, 1),
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
    assert caught.value is error and trainer.agents[1].training
    assert all(model.generation_config is one for model, one in zip(trainer.agents, kept))


@pytest.mark.parametrize("kind, more", [("gpt2", dict(n_positions=16))])
def test_a_prompt_longer_than_the_model(kind, more):
    with pytest.raises(ValueError, match="max_prompt_length"):
        make(team((kind, kind), **more), train_dataset=[{"prompt": "a prompt of more than sixteen tokens"}]).train()


def test_column_that_a_row_lacks():
    with pytest.raises(ValueError, match="reward_func.*'answer'"):
        make(train_dataset=[{"prompt": "a", "answer": 1}, {"prompt": "b"}], reward_func=lambda first, second, answer: 0.0).train()


def test_a_prompt_without_tokens():
    class Deaf(type(TOKENIZER)):
        def __call__(self, text, **more):
            return {"input_ids": []}

    tokenizer = micro_tokenizer()
    tokenizer.__class__ = Deaf
    with pytest.raises(ValueError, match="'say abab.*' has no tokens|'say ab' has no tokens"):
        make(tokenizer=tokenizer).train()


def test_pairs_of_another_team_are_refused():
    pairs = make(team(("gpt2",) * 3), num_agents=3, reward_func=lambda *texts: letters(texts[0], texts[1])).collect()
    with pytest.raises(ValueError, match="pairs.*3.*2|pairs.*2.*3"):
        make().train_on(pairs)


@pytest.mark.parametrize("value", [[{"prompt": "a"}], ["pair"], [1], "pairs"])
def test_train_on_something_else(value):
    with pytest.raises(ValueError, match="pairs"):
        make().train_on(value)


def test_eval_aggregator_that_returns_no_mapping():
    trainer = make(eval_dataset=rows(1), eval_logger=lambda **given: [], eval_aggregator=lambda details, num_turns: 3)
    with pytest.raises(ValueError, match="eval_aggregator"):
        trainer.evaluate()

"""Names, plans, copies, tokenizers, special tokens, dtypes and tied embeddings, with tiny models saved on disk and no network."""
import copy
import importlib
import inspect

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers.utils.logging import disable_progress_bar

from comlrl_nb.models import loading
from comlrl_nb.models.loading import (
    AgentPlan, fit_embeddings, infer_model_name, is_tied, load_agents, load_model, load_planned, plan_agents, read_model_config,
    resolve_model_sources)
from comlrl_nb.toy import micro_model, micro_tokenizer
from comlrl_nb.utils.distributed import DistributedContext, local_context, unwrap_model
from comlrl_nb.utils.tokenizer_utils import (
    add_special_tokens, apply_tokenizer_specials, ensure_pad_token, ensure_tokenizer, eos_ids, resolve_tokenizers, vocabulary_size)

disable_progress_bar()
ROWS = len(micro_tokenizer())
AGENT = {"special_tokens": {"extra_special_tokens": ["<agent>"]}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a tied Llama, an untied GPT-2 and a tied half-precision Llama, each with the micro tokenizer."""
    root, paths = tmp_path_factory.mktemp("models"), {}
    for name, model in {"llama": micro_model(tie_word_embeddings=True), "gpt2": micro_model(kind="gpt2", tie_word_embeddings=False),
                        "half": micro_model(tie_word_embeddings=True, dtype=torch.float16)}.items():
        paths[name] = str(root / name)
        model.save_pretrained(paths[name])
        micro_tokenizer().save_pretrained(paths[name])
    return paths


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """A name that is no folder fails at once instead of asking the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def no_loading(monkeypatch):
    """Any attempt to read a model, a configuration or a tokenizer fails the test."""
    def refuse(*args, **kwargs):
        raise AssertionError(f"something was loaded: {args}")

    for auto in (loading.AutoModelForCausalLM, loading.AutoConfig, AutoTokenizer):
        monkeypatch.setattr(auto, "from_pretrained", refuse)


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[1, 5, 9]])).logits


# names and sources

@pytest.mark.parametrize("source, expected", [(None, None), ("", None), ("org/model", "org/model")])
def test_names_of_strings(source, expected):
    assert infer_model_name(source) == expected


def test_names_of_objects(saved, tmp_path):
    model = load_model(saved["llama"])

    class WithHead(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.model = inner

    assert infer_model_name(model) == infer_model_name(torch.nn.DataParallel(model)) == infer_model_name(WithHead(model)) == saved["llama"]
    assert infer_model_name(tmp_path) == str(tmp_path)
    assert infer_model_name(micro_model()) is None and infer_model_name(torch.nn.Linear(1, 1)) is None, "a model type is not an identifier"


def test_sources():
    a, b = micro_model(), micro_model(1)
    assert resolve_model_sources(kind="critics", model="x", models=None, expected_count=3, model_label="critic_model") == (["x"] * 3, "x")
    assert resolve_model_sources(kind="critics", model=None, models=[a, b], expected_count=2) == ([a, b], None)
    assert resolve_model_sources(kind="critics", model="x", models=("x", "x"), expected_count=2) == (["x", "x"], "x")
    assert resolve_model_sources(kind="agents", model="x", models=[a, b], expected_count=2)[0] == [a, b], "unknown names agree with any"


@pytest.mark.parametrize("arguments, fragments", [
    ({}, ["critic_model=None", "critics=None"]),
    ({"models": "x"}, ["critics='x'", "list"]),
    ({"models": 3}, ["critics=3", "list"]),
    ({"models": ["x"]}, ["critics has 1 entries", "num_agents (2)"]),
    ({"models": []}, ["critics has 0 entries"]),
    ({"models": ["x", None]}, ["critics[1]=None"]),
    ({"model": "x", "models": ["x"] * 3}, ["critics has 3 entries"]),
    ({"model": "x", "models": ["x", "y"]}, ["critic_model='x'", "critics[1]='y'"]),
    ({"model": "x", "expected_count": 0}, ["num_agents (0)", "at least 1"]),
    ({"models": ["x"], "expected_label": "one shared critic"}, ["one shared critic"]),
])
def test_bad_sources(arguments, fragments):
    defaults = {"kind": "critics", "model": None, "models": None, "expected_count": 2, "model_label": "critic_model"}
    with pytest.raises(ValueError) as caught:
        resolve_model_sources(**{**defaults, **arguments})
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


def test_public_signatures_and_paths():
    utils = importlib.import_module("comlrl_nb.utils")
    assert utils.infer_model_name is infer_model_name
    assert utils.resolve_model_sources is importlib.import_module("comlrl_nb.utils.model_loading").resolve_model_sources
    assert utils.ensure_pad_token is ensure_pad_token and utils.local_context is local_context and "unwrap_model" in dir(utils)
    with pytest.raises(AttributeError, match="no_such_name"):
        utils.no_such_name
    assert list(inspect.signature(resolve_model_sources).parameters) == ["kind", "model", "models", "expected_count", "expected_label", "model_label"]
    assert list(inspect.signature(resolve_tokenizers).parameters) == ["model", "tokenizer", "agents"]
    assert local_context(torch.device("cpu")) == DistributedContext(is_main=True, device=torch.device("cpu"))


def test_unwrap():
    layer = torch.nn.Linear(1, 1)
    assert unwrap_model(layer) is layer
    assert unwrap_model(torch.nn.DataParallel(torch.nn.DataParallel(layer))) is layer
    assert unwrap_model(torch.compile(layer)) is layer


# plans

def objects(count=2):
    return [micro_model(seed) for seed in range(count)]


BAD_PLANS = [
    ("nothing", lambda: {}, ["agent_model=None", "agents=None"]),
    ("empty name", lambda: {"agent_model": ""}, ["agent_model=''"]),
    ("empty name in list", lambda: {"agents": ["x", ""]}, ["agents[1]=''"]),
    ("agents is a name", lambda: {"agents": "x"}, ["agents='x'", "list"]),
    ("agents is empty", lambda: {"agents": []}, ["agents has 0 entries"]),
    ("agents holds None", lambda: {"agents": ["x", None]}, ["agents[1]=None"]),
    ("agents holds a number", lambda: {"agents": ["x", 3]}, ["agents[1]=3"]),
    ("mixture", lambda: {"agents": ["x", micro_model()], "tokenizer": micro_tokenizer()}, ["agents", "mixture"]),
    ("agent_model is a number", lambda: {"agent_model": 7}, ["agent_model=7"]),
    ("one object for two", lambda: {"agent_model": micro_model(), "tokenizer": micro_tokenizer()}, ["agent_model", "LlamaForCausalLM", "identifier"]),
    ("objects without tokenizer", lambda: {"agents": objects()}, ["tokenizer=None", "objects"]),
    ("count", lambda: {"agent_model": "x", "agents": ["x"] * 3}, ["agents has 3 entries", "num_agents (2, the default)"]),
    ("count without agent_model", lambda: {"agents": ["x"] * 2, "num_agents": 3}, ["agents has 2 entries", "num_agents (3)"]),
    ("names disagree", lambda: {"agent_model": "x", "agents": ["x", "y"]}, ["agent_model='x'", "agents[1]='y'"]),
    ("num_agents zero", lambda: {"agent_model": "x", "num_agents": 0}, ["num_agents=0"]),
    ("num_agents text", lambda: {"agent_model": "x", "num_agents": "2"}, ["num_agents='2'"]),
    ("num_agents bool", lambda: {"agent_model": "x", "num_agents": True}, ["num_agents=True"]),
    ("num_agents float", lambda: {"agent_model": "x", "num_agents": 2.0}, ["num_agents=2.0"]),
    ("tokenizer is a name", lambda: {"agents": objects(), "tokenizer": "x"}, ["tokenizer='x'"]),
    ("tokenizer is a number", lambda: {"agent_model": "x", "tokenizer": 3}, ["tokenizer=3"]),
    ("tokenizer count", lambda: {"agents": objects(), "tokenizer": [micro_tokenizer()] * 3}, ["tokenizer has 3 entries", "2 agents"]),
    ("tokenizer count for names", lambda: {"agent_model": "x", "tokenizer": [micro_tokenizer()]}, ["tokenizer has 1 entries", "2 agents"]),
    ("tokenizer list empty", lambda: {"agents": objects(), "tokenizer": []}, ["tokenizer has 0 entries"]),
    ("tokenizer list holds None", lambda: {"agents": objects(), "tokenizer": [micro_tokenizer(), None]}, ["tokenizer=None"]),
    ("no room for new tokens", lambda: {"agents": objects(), "tokenizer": micro_tokenizer(), "model_config": AGENT},
     ["agents[0]", f"{ROWS} embeddings", f"needs {ROWS + 1}", "resize_token_embeddings"]),
    ("no room in the second", lambda: {"agents": [micro_model(), micro_model(vocab_size=50)], "tokenizer": micro_tokenizer()}, ["agents[1]", "50 embeddings"]),
    ("config is no dictionary", lambda: {"agent_model": "x", "model_config": "bf16"}, ["model_config='bf16'"]),
    ("unknown key", lambda: {"agent_model": "x", "model_config": {"dtpye": "bfloat16"}}, ["model_config['dtpye']", "torch_dtype", "special_tokens"]),
    ("section is no dictionary", lambda: {"agent_model": "x", "model_config": {"model_kwargs": [1]}}, ["model_config['model_kwargs']=[1]"]),
    ("tokenizer_kwargs", lambda: {"agent_model": "x", "model_config": {"tokenizer_kwargs": 1}}, ["model_config['tokenizer_kwargs']=1"]),
    ("special_tokens", lambda: {"agent_model": "x", "model_config": {"special_tokens": ["<a>"]}}, ["model_config['special_tokens']"]),
    ("special token name", lambda: {"agents": objects(), "tokenizer": micro_tokenizer(), "model_config": {"special_tokens": {"foo": "<a>"}}},
     ["model_config['special_tokens']", "foo"]),
    ("dtype", lambda: {"agent_model": "x", "model_config": {"dtype": "bf16"}}, ["model_config['dtype']='bf16'", "bfloat16"]),
    ("dtype of integers", lambda: {"agent_model": "x", "model_config": {"torch_dtype": torch.int8}}, ["model_config['torch_dtype']=torch.int8"]),
    ("dtype in section", lambda: {"agent_model": "x", "model_config": {"model_kwargs": {"dtype": 16}}}, ["model_config['model_kwargs']['dtype']=16"]),
    ("two dtypes", lambda: {"agent_model": "x", "model_config": {"dtype": "float32", "torch_dtype": "float16"}}, ["torch_dtype='float16'", "dtype='float32'"]),
    ("device_map", lambda: {"agent_model": "x", "model_config": {"model_kwargs": {"device_map": "auto"}}}, ["device_map", "'auto'", "device fields"]),
    ("critic head", lambda: {"agent_model": "x", "model_config": {"critic_value_head_hidden_dim": 0}}, ["critic_value_head_hidden_dim", "0"]),
]


@pytest.mark.parametrize("arguments, fragments", [case[1:] for case in BAD_PLANS], ids=[case[0] for case in BAD_PLANS])
def test_a_bad_plan_names_field_and_value_before_anything_is_loaded(no_loading, arguments, fragments):
    with pytest.raises(ValueError) as caught:
        plan_agents(**arguments())
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


def test_good_plans(no_loading, tmp_path):
    assert plan_agents("x").names == ("x", "x") and plan_agents("x", num_agents=4).names == ("x",) * 4
    assert plan_agents(agents=["x", "y", "z"]).names == ("x", "y", "z"), "agents set the number where num_agents is left at its default"
    assert plan_agents("x", ["x", "x"]).model_name == "x"
    assert plan_agents(tmp_path, [tmp_path, str(tmp_path)]).sources == (str(tmp_path),) * 2
    model = micro_model()
    alone = plan_agents(model, num_agents=1, tokenizer=micro_tokenizer())
    assert alone.sources == (model,) and alone.names == (None,) and not alone.by_name
    assert plan_agents("x", [model, model], tokenizer=micro_tokenizer()).model_name == "x"


def test_tokenizers_of_a_plan():
    one, two = micro_tokenizer(), micro_tokenizer()
    assert plan_agents(agents=objects(), tokenizer=one).tokenizers == (one, one)
    assert plan_agents(agents=objects(), tokenizer=[one, two]).tokenizers == (one, two)
    assert plan_agents("x", tokenizer=[one, two]).tokenizers == (one, two)
    first, second = plan_agents("x", tokenizer=one, model_config=AGENT).tokenizers
    assert first is second is not one and len(first) == ROWS + 1 and len(one) == ROWS


# model_config

@pytest.mark.parametrize("config, actor, critic", [
    (None, {"attn_implementation": "sdpa"}, {"attn_implementation": "sdpa"}),
    ({"model_kwargs": None, "critic_value_head_hidden_dim": None}, {"attn_implementation": "sdpa"}, {"attn_implementation": "sdpa"}),
    ({"torch_dtype": torch.bfloat16}, {"attn_implementation": "sdpa", "dtype": torch.bfloat16}, {"attn_implementation": "sdpa", "dtype": torch.bfloat16}),
    ({"dtype": "torch.float16", "attn_implementation": None}, {"dtype": torch.float16}, {"dtype": torch.float16}),
    ({"dtype": "auto", "torch_dtype": None}, {"attn_implementation": "sdpa", "dtype": "auto"}, {"attn_implementation": "sdpa", "dtype": "auto"}),
    ({"dtype": "float32", "model_kwargs": {"torch_dtype": "bfloat16", "revision": "main", "attn_implementation": "eager"}},
     {"attn_implementation": "eager", "dtype": torch.bfloat16, "revision": "main"}, {"attn_implementation": "eager", "dtype": torch.float32}),
    ({"critic_model_kwargs": {"attn_implementation": None, "dtype": "float64"}}, {"attn_implementation": "sdpa"}, {"dtype": torch.float64}),
    ({"dtype": "float16", "torch_dtype": torch.float16}, {"attn_implementation": "sdpa", "dtype": torch.float16}, {"attn_implementation": "sdpa", "dtype": torch.float16}),
])
def test_settings(config, actor, critic):
    before = copy.deepcopy(config)
    settings = read_model_config(config)
    assert settings.model_kwargs == actor and settings.critic_model_kwargs == critic and config == before


def test_attention_and_dtype_reach_the_model(saved):
    team = load_agents(saved["gpt2"], model_config={"model_kwargs": {"dtype": "bfloat16", "attn_implementation": "eager"}})
    assert {model.dtype for model in team.models} == {torch.bfloat16} and {model.config._attn_implementation for model in team.models} == {"eager"}
    assert load_agents(saved["gpt2"]).models[0].config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind, dtype", [("half", torch.float16), ("llama", torch.float32)])
def test_stored_dtype_is_kept(saved, kind, dtype):
    assert {model.dtype for model in load_agents(saved[kind]).models} == {dtype}


# loading

def test_one_name_becomes_distinct_equal_copies(saved):
    team = load_agents(saved["llama"], num_agents=3)
    assert team.names == [saved["llama"]] * 3 and team.model_name == saved["llama"] and team.owners == [0, 1, 2]
    pointers = {p.data_ptr() for model in team.models for p in model.parameters()}
    assert len(pointers) == 3 * len(list(team.models[0].parameters())), "parameters are shared between agents"
    assert torch.equal(logits(team.models[0]), logits(team.models[2])) and all(is_tied(model) and not model.training for model in team.models)
    with torch.no_grad():
        team.models[0].get_input_embeddings().weight.zero_()
    assert not torch.equal(logits(team.models[0]), logits(team.models[1]))
    assert team.tokenizers[0] is team.tokenizers[2]


def test_each_name_is_read_once(saved, monkeypatch):
    read, original = [], AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", lambda name, **kwargs: read.append(name) or original(name, **kwargs))
    team = load_agents(agents=[saved["llama"], saved["gpt2"], saved["llama"]])
    assert read == [saved["llama"], saved["gpt2"]]
    assert [type(model).__name__ for model in team.models] == ["LlamaForCausalLM", "GPT2LMHeadModel", "LlamaForCausalLM"]
    assert team.models[0] is not team.models[2] and team.tokenizers[0] is team.tokenizers[2] is not team.tokenizers[1]


def test_C47_the_same_object_twice_stays_one_object():
    model, other = micro_model(), micro_model(1)
    team = load_agents(agents=[model, other, model], tokenizer=micro_tokenizer())
    assert team.models[0] is team.models[2] is model and team.owners == [0, 1, 0] and "agent 0" in team._repr_markdown_()
    assert team.models[0].config.pad_token_id == 0, "a caller's configuration was changed"


def test_equal_objects_stay_distinct():
    model = micro_model()
    assert load_agents(agents=[model, copy.deepcopy(model)], tokenizer=micro_tokenizer()).owners == [0, 1]


def test_devices(saved):
    cpu, other = torch.device("cpu"), torch.device("cpu:1")
    assert len(load_agents(saved["llama"], devices=[cpu, other]).models) == 2
    model = micro_model()
    load_agents(agents=[model, model], tokenizer=micro_tokenizer(), devices=[other, other])
    with pytest.raises(ValueError, match=r"agent_devices: agents\[0\] and agents\[1\] are the same object.*cpu and cpu:1"):
        load_agents(agents=[model, model], tokenizer=micro_tokenizer(), devices=[cpu, other])
    with pytest.raises(ValueError, match="agent_devices has 1 entries.*2 agents"):
        load_planned(plan_agents(saved["llama"]), [cpu])


def bad_folder(tmp_path, kind):
    if kind == "weights only":
        micro_model().save_pretrained(tmp_path)
    elif kind == "not a causal model":
        (tmp_path / "config.json").write_text('{"model_type": "t5"}')
        micro_tokenizer().save_pretrained(tmp_path)
    elif kind == "no model type":
        (tmp_path / "config.json").write_text('{"hidden_size": 1}')
        micro_tokenizer().save_pretrained(tmp_path)
    elif kind == "missing":
        return str(tmp_path / "missing")
    elif kind == "hub name":
        return "no-such-org/no-such-model"
    elif kind == "not a name":
        return "no such name"
    return str(tmp_path)


@pytest.mark.parametrize("kind", ["missing", "hub name", "not a name", "empty folder", "weights only", "not a causal model", "no model type"])
def test_unknown_names_are_value_errors_with_a_remedy_and_a_cause(tmp_path, kind):
    name = bad_folder(tmp_path, kind)
    with pytest.raises(ValueError) as caught:
        load_agents(name)
    message = str(caught.value)
    assert repr(name) in message and "expected" in message and "could" in message and caught.value.__cause__ is not None


def test_a_wrong_second_name_is_found_before_the_first_model_is_read(saved, monkeypatch):
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("a model was read"))
    with pytest.raises(ValueError, match="no-such"):
        load_agents(agents=[saved["llama"], "no-such-org/no-such-model"], tokenizer=micro_tokenizer())


def test_a_plan_can_be_carried_out_twice(saved):
    plan = plan_agents(saved["gpt2"])
    assert isinstance(plan, AgentPlan)
    one, two = load_planned(plan), load_planned(plan)
    assert one.models[0] is not two.models[0] and torch.equal(logits(one.models[0]), logits(two.models[1]))


# tokenizers

def bare_tokenizer(**tokens):
    tokenizer = micro_tokenizer()
    for name, value in {"pad_token": None, **tokens}.items():
        setattr(tokenizer, name, value)
    return tokenizer


@pytest.mark.parametrize("how", ["ensure", "resolve", "resolve list", "plan", "plan names", "load"])
def test_C11_padding_falls_back_to_the_end_token_on_a_copy(saved, how):
    given = bare_tokenizer(bos_token=None)
    found = {
        "ensure": lambda: ensure_pad_token(given), "resolve": lambda: resolve_tokenizers(None, given, objects()),
        "resolve list": lambda: resolve_tokenizers(None, [given, given], None)[1],
        "plan": lambda: plan_agents(agents=objects(), tokenizer=given).tokenizers[0],
        "plan names": lambda: plan_agents("x", tokenizer=given).tokenizers[1],
        "load": lambda: load_agents(saved["llama"], tokenizer=given).tokenizers[1],
    }[how]()
    assert found.pad_token_id == found.eos_token_id == 2 and given.pad_token is None and given.pad_token_id is None
    assert None not in found("ab").input_ids


@pytest.mark.parametrize("how", ["ensure", "resolve", "plan", "load"])
def test_C11_neither_padding_nor_end_token(saved, how):
    given = bare_tokenizer(eos_token=None)
    with pytest.raises(ValueError, match="tokenizer.pad_token=None and tokenizer.eos_token=None"):
        {"ensure": lambda: ensure_pad_token(given), "resolve": lambda: resolve_tokenizers(None, given, objects()),
         "plan": lambda: plan_agents(agents=objects(), tokenizer=given), "load": lambda: load_agents(saved["llama"], tokenizer=given)}[how]()


def test_C11_tokenizer_of_a_name_without_padding(tmp_path):
    micro_model().save_pretrained(tmp_path)
    bare_tokenizer().save_pretrained(tmp_path)
    team = load_agents(str(tmp_path))
    assert [tokenizer.pad_token_id for tokenizer in team.tokenizers] == [2, 2]


def test_no_end_token_anywhere(tmp_path):
    model = micro_model()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    tokenizer = micro_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="tokenizer.eos_token=None"):
        plan_agents(agents=[model, model], tokenizer=tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tokenizer.eos_token=None"):
        load_agents(str(tmp_path))


def test_ensure_tokenizer(saved):
    tokenizer = micro_tokenizer()
    assert ensure_tokenizer(None, tokenizer) is tokenizer and ensure_tokenizer(saved["llama"], None).pad_token_id == 0
    for model in (None, micro_model()):
        with pytest.raises(ValueError, match="tokenizer=None"):
            ensure_tokenizer(model, None)


def test_resolve_tokenizers(saved):
    tokenizer = micro_tokenizer()
    assert resolve_tokenizers("x", tokenizer, None) is tokenizer and resolve_tokenizers(None, tokenizer, objects()) is tokenizer
    assert resolve_tokenizers(saved["llama"], None, None).pad_token_id == 0
    assert len(resolve_tokenizers(None, None, [saved["llama"], saved["gpt2"]])) == 2
    with pytest.raises(ValueError, match="tokenizer=None"):
        resolve_tokenizers("x", None, objects())


@pytest.mark.parametrize("generation, config, own, expected", [
    (2, 2, "<eos>", (2,)), ([7, 2], 2, "<eos>", (2, 7)), ([7, 8], 9, "<eos>", (2, 7, 8, 9)), (None, None, "<eos>", (2,)), (7, None, None, (7,)),
    (None, [9, 7], None, (9, 7)), (50256, 50256, "<eos>", (2,)), ([50256, 7], -1, "<eos>", (2, 7)),
])
def test_end_ids(generation, config, own, expected):
    model, tokenizer = micro_model(), micro_tokenizer()
    model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token = generation, config, own
    assert eos_ids(model, tokenizer) == eos_ids(torch.nn.DataParallel(model), tokenizer) == expected
    assert all(type(i) is int for i in eos_ids(model, tokenizer))


def test_end_ids_of_a_model_without_generation_config():
    model = micro_model()
    del model.generation_config
    assert eos_ids(model, micro_tokenizer()) == (2,)


@pytest.mark.parametrize("value", ["2", True, [True], [None], 2.0])
def test_end_ids_of_a_wrong_type(value):
    model = micro_model()
    model.generation_config.eos_token_id = value
    with pytest.raises(ValueError, match="model.generation_config.eos_token_id="):
        eos_ids(model, micro_tokenizer())


def test_the_tokenizers_end_token_must_be_in_the_models_vocabulary(tmp_path):
    tokenizer = add_special_tokens(micro_tokenizer(), {"eos_token": "<end>"})
    with pytest.raises(ValueError, match=f"tokenizer.eos_token_id={ROWS}.*{ROWS} entries"):
        eos_ids(micro_model(), tokenizer)


def test_apply_tokenizer_specials():
    model, several = micro_model(), micro_model(kind="gpt2")
    several.generation_config.eos_token_id = [7, 2]
    given = bare_tokenizer()
    assert apply_tokenizer_specials(given, [model, None, several]) is None
    assert (model.config.pad_token_id, model.config.eos_token_id) == (2, 2) and several.config.eos_token_id == [2, 7] and given.pad_token is None


# special tokens and embeddings

@pytest.mark.parametrize("kind", ["llama", "gpt2", "half"])
def test_special_tokens_get_rows_at_the_mean(saved, kind):
    state = torch.random.get_rng_state()
    team = load_agents(saved[kind], model_config=AGENT)
    assert torch.equal(torch.random.get_rng_state(), state), "the random state moved"
    plain = load_model(saved[kind])
    for model, tokenizer in zip(team.models, team.tokenizers):
        new = tokenizer.convert_tokens_to_ids("<agent>")
        assert new == ROWS and vocabulary_size(model) == model.config.vocab_size == ROWS + 1 and is_tied(model) == is_tied(plain)
        for get in ("get_input_embeddings", "get_output_embeddings"):
            weight, old = getattr(model, get)().weight, getattr(plain, get)().weight
            assert torch.equal(weight[:ROWS], old) and torch.allclose(weight[new], old.float().mean(0).to(old.dtype), atol=1e-6)
            assert weight.requires_grad
        assert torch.isfinite(model(input_ids=torch.tensor([[1, new]])).logits).all()
    assert torch.equal(logits(team.models[0]), logits(team.models[1]))


def test_a_larger_tokenizer_given_with_a_name(saved):
    tokenizer = add_special_tokens(micro_tokenizer(), {"pad_token": "<padding>"})
    team = load_agents(saved["gpt2"], tokenizer=tokenizer)
    assert [vocabulary_size(model) for model in team.models] == [ROWS + 1] * 2 and team.tokenizers[0] is tokenizer


def test_a_larger_model_is_not_cut(saved):
    model = micro_model(vocab_size=ROWS + 10)
    assert fit_embeddings(model, micro_tokenizer()) is model and vocabulary_size(model) == ROWS + 10


def test_output_bias_grows_too():
    model = micro_model(kind="gpt2", tie_word_embeddings=False)
    model.lm_head = torch.nn.Linear(16, ROWS, bias=True)
    fit_embeddings(model, add_special_tokens(micro_tokenizer(), AGENT["special_tokens"]))
    assert torch.allclose(model.lm_head.bias[ROWS], model.lm_head.bias[:ROWS].mean())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("resized", [False, True])
def test_C49_tied_embeddings_survive_loading_resizing_training_and_saving(tmp_path, kind, resized):
    micro_model(kind=kind, tie_word_embeddings=True).save_pretrained(tmp_path / "in")
    micro_tokenizer().save_pretrained(tmp_path / "in")
    team = load_agents(str(tmp_path / "in"), model_config=AGENT if resized else None)
    for i, model in enumerate(team.models):
        assert is_tied(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        assert sum(p is model.get_input_embeddings().weight for group in optimizer.param_groups for p in group["params"]) == 1
        before = model.get_input_embeddings().weight.detach().clone()
        model(input_ids=torch.tensor([[1, 5, 9]])).logits.logsumexp(-1).sum().backward()
        optimizer.step()
        assert is_tied(model) and not torch.equal(before, model.get_output_embeddings().weight)
        model.save_pretrained(tmp_path / f"agent_{i}")
        team.tokenizers[i].save_pretrained(tmp_path / f"agent_{i}")
    assert torch.equal(team.models[0].get_input_embeddings().weight, team.models[1].get_input_embeddings().weight)
    again = load_agents(agents=[str(tmp_path / "agent_0"), str(tmp_path / "agent_1")])
    for model, reloaded in zip(team.models, again.models):
        assert is_tied(reloaded) and reloaded.get_input_embeddings().weight.data_ptr() == reloaded.get_output_embeddings().weight.data_ptr()
        assert torch.equal(logits(model), logits(reloaded))
    assert [len(tokenizer) for tokenizer in again.tokenizers] == [ROWS + resized] * 2


def test_default_config_of_a_small_gpt2_with_end_ids_of_the_large_one():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=ROWS, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    assert eos_ids(model, micro_tokenizer()) == (2,)

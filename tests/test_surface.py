"""Every public name of comlrl that exists here takes the same arguments, with the same defaults, and has the same methods."""
import ast
import importlib
import importlib.util
import inspect
import json
from pathlib import Path

import pytest

SURFACE = json.loads((Path(__file__).parent / "data" / "api_surface.json").read_text())
OURS = {"args", "kwargs"}  # an __init__ that takes anything
CHANGED = {"early_termination_threshold", "reward_model_device", "centralized_adapter"}
SPOKEN = ("agents", "critics", "optimizers", "agent_optimizers", "critic_optimizers", "critic_optimizer", "tokenizers", "num_agents", "model_name",
          "reference_models", "env_step", "args", "verbose", "algorithm_name")


def locate(key):
    """The object of a key, None when it does not exist yet."""
    package, name = key.rsplit(".", 1)
    try:
        return getattr(importlib.import_module(package), name, None)
    except ImportError:
        return None


FOUND = {key: found for key in SURFACE if (found := locate(key)) is not None}
TRAINERS = [key for key in FOUND if key.endswith("Trainer")]


def split(entry):
    """("name", default or nothing) of "name=default"."""
    name, _, default = entry.partition("=")
    return (name, inspect.Parameter.empty) if not default else (name, ast.literal_eval(default))


def expected(entries):
    found = dict(split(entry.lstrip("*")) for entry in entries)
    return {name: default for name, default in found.items() if name not in OURS or default is not inspect.Parameter.empty}


def test_madpo_is_here():
    assert {"comlrl_nb.trainers.preference.MADPOTrainer", "comlrl_nb.trainers.preference.MADPOConfig",
            "comlrl_nb.trainers.preference.TaggedCentralizedComparatorAdapter"} <= FOUND.keys()
    assert sum(key.endswith("Config") for key in FOUND) == sum(key.endswith("Config") for key in SURFACE)


@pytest.mark.parametrize("key", FOUND)
def test_the_name_is_listed_by_its_package(key):
    package, name = key.rsplit(".", 1)
    module = importlib.import_module(package)
    assert name in module.__all__ and name in dir(module)


@pytest.mark.parametrize("key", FOUND)
def test_the_module_that_defines_it_there_has_it_here(key):
    place = SURFACE[key]["defined_in"]
    package = place.rpartition(".")[0]
    if importlib.util.find_spec(package) is None or importlib.util.find_spec(place) is None:
        pytest.skip(f"{place} comes with its trainer")
    assert getattr(importlib.import_module(place), key.rsplit(".", 1)[1]) is FOUND[key]


@pytest.mark.parametrize("key", [key for key in FOUND if SURFACE[key].get("init")])
def test_constructor(key):
    if "Adapter" in key or "Error" in key:
        pytest.skip("a protocol or an exception")
    theirs = expected(SURFACE[key]["init"])
    parameters = inspect.signature(FOUND[key].__init__).parameters
    for name, default in theirs.items():
        assert name in parameters, name
        assert parameters[name].default == default or name in CHANGED, f"{name}: {parameters[name].default!r} is not {default!r}"
    ours = [name for name, p in parameters.items() if name != "self" and p.kind is p.POSITIONAL_OR_KEYWORD]
    anything = "args" in SURFACE[key]["init"]  # theirs takes whatever its parent takes
    assert anything or ours == [name for name in theirs if name in ours], "the order of what may be given by position"


def test_default_number_of_agents_reads_as_two():
    default = inspect.signature(FOUND["comlrl_nb.trainers.preference.MADPOTrainer"].__init__).parameters["num_agents"].default
    assert default == 2 and repr(default) == "2" and isinstance(default, int)


METHODS = [(key, name) for key in FOUND for name in SURFACE[key].get("public", ())]


@pytest.mark.parametrize("key, name", METHODS)
def test_method(key, name):
    theirs = expected(SURFACE[key]["public"][name])
    method = getattr(FOUND[key], name)
    parameters = inspect.signature(method).parameters
    for parameter, default in theirs.items():
        if parameter != "self":
            assert parameter in parameters and parameters[parameter].default == default, parameter


@pytest.mark.parametrize("key", TRAINERS)
def test_attributes_that_scripts_read(key):
    from madpo_runs import make
    trainer = make()
    for name in SPOKEN:
        assert hasattr(trainer, name), name


@pytest.mark.parametrize("key", TRAINERS)
def test_trainer_families_do_not_inherit_from_each_other(key):
    family = key.split(".")[2]
    assert all(base.__module__.split(".")[2] == family for base in FOUND[key].__mro__ if base.__name__.endswith("Trainer"))


@pytest.mark.parametrize("package", ["utils", "models", "schedulers", "trainers", "trainers.preference", "trainers.reinforce", "trainers.actor_critic"])
def test_every_listed_name_imports(package):
    module = importlib.import_module(f"comlrl_nb.{package}")
    assert module.__all__ and all(getattr(module, name) is not None for name in module.__all__)

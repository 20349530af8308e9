"""Models and how they are loaded, imported when first used."""
from importlib import import_module

_HOME = {
    "ActorCriticOutput": "comlrl_nb.models.actor_critic",
    "CausalLMWithValueHead": "comlrl_nb.models.actor_critic",
    "ValueHead": "comlrl_nb.models.actor_critic",
    "load_agents": "comlrl_nb.models.loading",
    "load_model": "comlrl_nb.models.loading",
}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__():
    return sorted({*globals(), *_HOME})

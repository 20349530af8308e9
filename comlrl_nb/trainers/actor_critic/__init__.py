"""Actor-critic trainers, imported when first used."""
from importlib import import_module

_HOME = {
    "IACConfig": "comlrl_nb.trainers.configs",
    "MAACConfig": "comlrl_nb.trainers.configs",
    "ActorCriticTrainerBase": "comlrl_nb.trainers.actor_critic.ac_base",
    "IACTrainer": "comlrl_nb.trainers.actor_critic.iac",
    "MAACTrainer": "comlrl_nb.trainers.actor_critic.maac",
    "RolloutSample": "comlrl_nb.trainers.actor_critic.ac_base",
}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__():
    return sorted({*globals(), *_HOME})

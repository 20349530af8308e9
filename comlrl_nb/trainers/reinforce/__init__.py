"""Trainers of the REINFORCE family, imported when first used."""
from importlib import import_module

_HOME = {
    "MAGRPOConfig": "comlrl_nb.trainers.configs",
    "CentralizedMAGRPOConfig": "comlrl_nb.trainers.configs",
    "MAREINFORCEConfig": "comlrl_nb.trainers.configs",
    "MARLOOConfig": "comlrl_nb.trainers.configs",
    "MAReMaxConfig": "comlrl_nb.trainers.configs",
    "MAGRPOTrainer": "comlrl_nb.trainers.reinforce.magrpo",
    "MAREINFORCETrainer": "comlrl_nb.trainers.reinforce.magrpo",
    "MARLOOTrainer": "comlrl_nb.trainers.reinforce.magrpo",
    "MAReMaxTrainer": "comlrl_nb.trainers.reinforce.magrpo",
    "CentralizedMAGRPOTrainer": "comlrl_nb.trainers.reinforce.centralized_magrpo",
}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__():
    return sorted({*globals(), *_HOME})

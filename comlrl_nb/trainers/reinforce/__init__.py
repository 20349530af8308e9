"""Trainers of the REINFORCE family, imported when first used."""
from importlib import import_module

_HOME = {
    "MAGRPOConfig": "comlrl_nb.trainers.configs",
    "CentralizedMAGRPOConfig": "comlrl_nb.trainers.configs",
    "MAREINFORCEConfig": "comlrl_nb.trainers.configs",
    "MARLOOConfig": "comlrl_nb.trainers.configs",
    "MAReMaxConfig": "comlrl_nb.trainers.configs",
}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__():
    return sorted({*globals(), *_HOME})

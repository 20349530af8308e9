"""Trainers that learn from preferences, imported when first used."""
from importlib import import_module

_HOME = {
    "MADPOConfig": "comlrl_nb.trainers.configs",
    "MADPOIterConfig": "comlrl_nb.trainers.configs",
    "MARLHFConfig": "comlrl_nb.trainers.configs",
    "MARLHFIterConfig": "comlrl_nb.trainers.configs",
    "MADPOTrainer": "comlrl_nb.trainers.preference.madpo",
    "MARLHFTrainer": "comlrl_nb.trainers.preference.marlhf",
    "MADPOIterTrainer": "comlrl_nb.trainers.preference.iterative",
    "MARLHFIterTrainer": "comlrl_nb.trainers.preference.iterative",
    "JointRewardModel": "comlrl_nb.models.reward",
    "CentralizedComparatorAdapter": "comlrl_nb.trainers.preference.centralized",
    "CentralizedComparatorParseError": "comlrl_nb.trainers.preference.centralized",
    "TaggedCentralizedComparatorAdapter": "comlrl_nb.trainers.preference.centralized",
}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__():
    return sorted({*globals(), *_HOME})

"""MARLOO under the module name that comlrl gives it."""
from comlrl_nb.trainers.configs import MARLOOConfig
from comlrl_nb.trainers.reinforce.magrpo import MARLOOTrainer

__all__ = ["MARLOOConfig", "MARLOOTrainer"]

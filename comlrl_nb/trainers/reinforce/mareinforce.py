"""MAREINFORCE under the module name that comlrl gives it."""
from comlrl_nb.trainers.configs import MAREINFORCEConfig
from comlrl_nb.trainers.reinforce.magrpo import MAREINFORCETrainer

__all__ = ["MAREINFORCEConfig", "MAREINFORCETrainer"]

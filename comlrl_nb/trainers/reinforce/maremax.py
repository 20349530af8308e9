"""MAReMax under the module name that comlrl gives it."""
from comlrl_nb.trainers.configs import MAReMaxConfig
from comlrl_nb.trainers.reinforce.magrpo import MAReMaxTrainer

__all__ = ["MAReMaxConfig", "MAReMaxTrainer"]

"""`read_checkpoint_metadata`, at the path where scripts look for it."""
from comlrl_nb.packing import read_checkpoint_metadata

__all__ = ["read_checkpoint_metadata"]

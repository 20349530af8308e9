"""The process a run lives in, at the path where scripts look for it."""
from comlrl_nb.schedulers.device_scheduler import DistributedContext, local_context, unwrap_model

__all__ = ["DistributedContext", "local_context", "unwrap_model"]

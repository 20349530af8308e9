"""Names and sources of models, at the path where scripts look for them."""
from comlrl_nb.models.loading import infer_model_name, resolve_model_sources

__all__ = ["infer_model_name", "resolve_model_sources"]

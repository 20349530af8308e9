"""Small helpers, imported when first used."""
from importlib import import_module

_HOME = {
    "DistributedContext": "comlrl_nb.utils.distributed",
    "local_context": "comlrl_nb.utils.distributed",
    "unwrap_model": "comlrl_nb.utils.distributed",
    "build_formatters": "comlrl_nb.utils.formatters",
    "infer_model_name": "comlrl_nb.utils.model_loading",
    "resolve_model_sources": "comlrl_nb.utils.model_loading",
    "clone_reference_models": "comlrl_nb.utils.reference_kl",
    "load_reference_models_from_sources": "comlrl_nb.utils.reference_kl",
    "reference_kl_coef": "comlrl_nb.utils.reference_kl",
    "reference_kl_enabled": "comlrl_nb.utils.reference_kl",
    "reference_kl_for_sequence": "comlrl_nb.utils.reference_kl",
    "resolve_reference_devices": "comlrl_nb.utils.reference_kl",
    "validate_reference_kl_config": "comlrl_nb.utils.reference_kl",
    "read_checkpoint_metadata": "comlrl_nb.utils.checkpoint",
    "RewardProcessors": "comlrl_nb.utils.reward_processor",
    "RewardFunction": "comlrl_nb.utils.reward_utils",
    "batched_reward": "comlrl_nb.utils.reward_utils",
    "call_reward_function": "comlrl_nb.utils.reward_utils",
    "normalize_reward_lengths": "comlrl_nb.utils.reward_utils",
    "resolve_reward_range": "comlrl_nb.utils.reward_utils",
    "set_reward_range": "comlrl_nb.utils.reward_utils",
    "apply_tokenizer_specials": "comlrl_nb.utils.tokenizer_utils",
    "ensure_pad_token": "comlrl_nb.utils.tokenizer_utils",
    "ensure_tokenizer": "comlrl_nb.utils.tokenizer_utils",
    "resolve_tokenizers": "comlrl_nb.utils.tokenizer_utils",
}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__():
    return sorted({*globals(), *_HOME})

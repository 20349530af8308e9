"""Every trainer and its configuration, imported when first used; each family's package says where a name lives."""
from importlib import import_module

_FAMILIES = [import_module(f"{__name__}.{family}") for family in ("reinforce", "actor_critic", "preference")]
_HOME = {name: family for family in _FAMILIES for name in family.__all__}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_HOME[name], name)


def __dir__():
    return sorted({*globals(), *_HOME})

"""Actor-critic trainers, imported when first used."""
from importlib import import_module

_HOME = {
    "IACConfig": "comlrl_nb.trainers.configs",
    "MAACConfig": "comlrl_nb.trainers.configs",
}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__():
    return sorted({*globals(), *_HOME})

"""Small helpers, imported when first used."""
from importlib import import_module

_HOME = {
    "build_formatters": "comlrl_nb.utils.formatters",
}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__():
    return sorted({*globals(), *_HOME})

"""Placement of models on devices, imported when first used."""
from importlib import import_module

_HOME = {
    "DeviceScheduler": "comlrl_nb.schedulers.device_scheduler",
}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__():
    return sorted({*globals(), *_HOME})

"""`build_formatters`, at the path where scripts look for it."""
from comlrl_nb.prompts import Formatter, build_formatters

__all__ = ["Formatter", "build_formatters"]

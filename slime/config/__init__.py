"""Configuration: every flag as data, one parser, one order of derived values, one set of checks.

Imports only the standard library (PyYAML inside functions), so that it works before anything heavy is installed.
"""

from slime.config.parse import parse_args
from slime.config.spec import UserError

__all__ = ["UserError", "parse_args"]

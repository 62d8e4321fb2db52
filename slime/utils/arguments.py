"""Import path of ``parse_args`` for existing scripts; the code lives in slime.config."""

from slime.config import parse_args

"""Compare two small arithmetic expressions by value, without ever evaluating text as code.

A hand-written parser accepts numbers, letters, + - * / ^, brackets, `sqrt(...)` and `pi`, with implicit multiplication;
anything else is no expression. Values are computed with mpmath at fixed complex points for the letters; decimals
are exact. Bounded by construction: text length, nesting and exponents have limits, so no input can hang or grow.
"""

from __future__ import annotations

import cmath
import functools
import math
import re

MAX_CHARS = 300
MAX_DEPTH = 40
MAX_EXPONENT = 1000
DIGITS = 60
TOLERANCE_DIGITS = 40

_TOKEN = re.compile(r"\s*(?:(?P<number>\d+\.?\d*|\.\d+)|(?P<name>sqrt|pi|[a-z])|(?P<op>\*\*|[-+*/^()]))")


class NotAnExpression(Exception):
    """The text is outside the small language, or beyond its limits."""


def same_value(first: str, second: str) -> bool:
    """Return whether both texts are expressions with the same value for every letter.

    >>> same_value("x^2+2x+1", "(x+1)^2"), same_value("2sqrt(3)", "sqrt(12)"), same_value("pi", "3.14159")
    (True, True, False)
    """
    try:
        return _agree(first, second, Floats, 1e-6) and _agree(first, second, _precise(), 10.0**-TOLERANCE_DIGITS)
    except (NotAnExpression, ZeroDivisionError, ValueError):
        return False


def _agree(first: str, second: str, context, tolerance: float) -> bool:
    """Return whether the values agree at three points; floats that overflow are left to the precise pass."""
    try:
        for point in range(3 if any(c.isalpha() for c in first + second) else 1):
            a, b = (_Parser(text, context, point).value() for text in (first, second))
            if not abs(a - b) <= tolerance * max(1, abs(a), abs(b)):
                return False
    except OverflowError:
        return context is Floats
    return True


class Floats:
    """The numbers of the quick first pass: Python's own, which tell most wrong answers apart in microseconds."""

    pi = math.pi
    mpf = float
    sqrt = staticmethod(cmath.sqrt)
    power = staticmethod(pow)

    @staticmethod
    def mpc(real: float, imaginary: float) -> complex:
        return complex(real, imaginary)


@functools.cache
def _precise():
    """Return a private mpmath context with DIGITS decimal digits."""
    import mpmath

    context = mpmath.mp.clone()
    context.dps = DIGITS
    return context


class _Parser:
    """Recursive descent that computes as it reads: sum -> product -> power -> atom."""

    def __init__(self, text: str, context, point: int):
        if len(text) > MAX_CHARS:
            raise NotAnExpression(f"longer than {MAX_CHARS} characters")
        self.context, self.point, self.depth, self.position = context, point, 0, 0
        self.tokens: list[tuple[str, str]] = []
        end = 0
        text = text.rstrip()
        while end < len(text):
            match = _TOKEN.match(text, end)
            if match is None:
                raise NotAnExpression(text[end:])
            self.tokens.append((match.lastgroup, match.group(match.lastgroup)))
            end = match.end()

    def value(self):
        result = self._sum()
        if self.position != len(self.tokens):
            raise NotAnExpression("trailing text")
        return result

    def _peek(self) -> tuple[str, str]:
        return self.tokens[self.position] if self.position < len(self.tokens) else ("end", "")

    def _take(self) -> tuple[str, str]:
        token = self._peek()
        self.position += 1
        return token

    def _sum(self):
        result = self._product()
        while self._peek()[1] in ("+", "-"):
            operator = self._take()[1]
            term = self._product()
            result = result + term if operator == "+" else result - term
        return result

    def _product(self):
        result = self._signed()
        while True:
            kind, text = self._peek()
            if text in ("*", "/"):
                self._take()
                factor = self._signed()
                result = result * factor if text == "*" else result / factor
            elif kind in ("number", "name") or text == "(":
                result = result * self._power()
            else:
                return result

    def _signed(self):
        sign = 1
        while self._peek()[1] in ("+", "-"):
            sign = -sign if self._take()[1] == "-" else sign
        return sign * self._power()

    def _power(self):
        base = self._atom()
        if self._peek()[1] not in ("^", "**"):
            return base
        self._take()
        self._enter()
        exponent = self._signed()
        self.depth -= 1
        if abs(exponent) > MAX_EXPONENT:
            raise NotAnExpression("exponent out of range")
        return self.context.power(base, exponent)

    def _atom(self):
        kind, text = self._take()
        if kind == "number":
            whole, _, decimals = text.partition(".")
            return self.context.mpf(int(whole + decimals or "0")) / self.context.mpf(10) ** len(decimals)
        if text == "pi":
            return +self.context.pi
        if kind == "name" and text != "sqrt":
            return self._letter(text)
        if text == "sqrt" and self._take()[1] != "(" or text not in ("(", "sqrt"):
            raise NotAnExpression(text)
        self._enter()
        inner = self._sum()
        self.depth -= 1
        if self._take()[1] != ")":
            raise NotAnExpression("missing )")
        return self.context.sqrt(inner) if text == "sqrt" else inner

    def _letter(self, letter: str):
        """Return the fixed complex value that stands for a letter at this evaluation point."""
        seed = (ord(letter) * 2654435761 + (self.point + 1) * 40503) % 9973 + 1
        sign = (1, -1, 1)[self.point]
        return self.context.mpc(sign * seed, (seed * 7) % 9973 - 4986) / 3571

    def _enter(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotAnExpression("nested too deeply")

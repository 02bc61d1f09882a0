r"""Reading an expression in LaTeX or plain text and computing its value in one go, by recursive descent.

Length and depth are bounded.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from fractions import Fraction
from math import comb

from swift_r1.rewards.graders.bounded import (
    MAX_BITS,
    Unreadable,
    Value,
    add,
    bounded,
    divide,
    factorial,
    is_small_whole,
    mp,
    multiply,
    power,
    real,
    root,
    subtract,
)

MAX_LENGTH = 400  # characters
MAX_DEPTH = 40
# sets of values of the variables; the first has positive values only, the others both signs
POINTS = 3
POINTS_ROUNDED = 32  # where something is rounded

_TOKEN = re.compile(
    r"\s+|(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(?P<command>\\[A-Za-z]+|\\[{}|])|(?P<symbol>[-+*/^_!()\[\]{}|'])"
    r"|(?P<letter>[A-Za-z])|(?P<unknown>.)",
    re.DOTALL,
)
# Written without the backslash, as plain text has them.
_NAME = re.compile(
    r"(?<![A-Za-z\\])(sqrt|arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|exp|ln|log|pi)(?![A-Za-z])"
)

_FUNCTIONS: dict[str, Callable[[Value], Value]] = {
    **{
        f"\\{name}": getattr(mp, name)
        for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")
    },
    **{f"\\arc{name}": getattr(mp, f"a{name}") for name in ("sin", "cos", "tan")},
    **{"\\ln": mp.log, "\\log": mp.log, "\\exp": mp.exp},
}
_GREEK = re.compile(
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau"
    r"|upsilon|(?:var)?phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega|hbar|ell)"
)
_OPERATORS = {"\\times": multiply, "*": multiply, "/": divide, "\\div": divide}
_ENDS = frozenset(
    ("+", "-", ")", "]", "}", "\\}", "\\rfloor", "\\rceil", "|", "\\times", "*", "/", "\\div")
)


def tokens(text: str) -> list[str]:
    r"""Returns numbers, commands such as `\frac` (also those written without the backslash), symbols and letters.

    Raises Unreadable: the text is too long, or has other characters.
    """
    if len(text) > MAX_LENGTH:
        raise Unreadable("too long")
    read = []
    for token in _TOKEN.finditer(_NAME.sub(r"\\\1 ", text)):
        if token.lastgroup == "unknown":
            raise Unreadable(f"unexpected {token[0]!r}")
        if token.lastgroup:
            read.append(token[0])

    return read


class ExpressionReader:
    """Reads tokens at one point of the variables, by the grammar

        sum      = product (("+" | "-") product)*
        product  = sign* power ((operator signed power) | power)*
        power    = atom ("!" | "^" argument)*
        atom     = bracketed sum | number | "|" sum "|" | letter | function | command

    `variables` says whether any was read, `rounded` whether anything was rounded: then many points give the same value.
    """

    def __init__(self, tokens: list[str], point: int) -> None:
        self._tokens = tokens
        self._at = 0
        self._point = point
        self._depth = 0
        self._bars = 0
        self.variables = self.rounded = False

    def whole(self) -> Value:
        """Returns the value of all tokens. Raises Unreadable."""
        value = self._sum()
        if self._at < len(self._tokens):
            raise Unreadable(f"unexpected {self._next!r}")
        return value

    @property
    def _next(self) -> str | None:
        return self._ahead(0)

    def _ahead(self, count: int) -> str | None:
        """Returns the token that is `count` after the next one; None behind the end."""
        place = self._at + count
        return self._tokens[place] if place < len(self._tokens) else None

    def _skip(self, token: str) -> bool:
        """Takes the next token where it is this one, and says whether it was."""
        if self._next != token:
            return False
        self._at += 1
        return True

    def _take(self) -> str:
        token = self._next
        if token is None:
            raise Unreadable("unexpected end")
        self._at += 1
        return token

    def _expect(self, token: str) -> None:
        if self._take() != token:
            raise Unreadable(f"{token} is missing")

    def _sum(self) -> Value:
        return self._nested(self._terms)

    def _terms(self) -> Value:
        value = self._product()
        while self._next in ("+", "-"):
            value = (add if self._take() == "+" else subtract)(value, self._product())
        return value

    def _product(self) -> Value:
        sign = 1
        while self._next in ("+", "-"):
            sign = -sign if self._take() == "-" else sign
        value = self._power()
        while self._next is not None and (self._next not in _ENDS or self._next in _OPERATORS):
            if self._next in _OPERATORS:
                value = _OPERATORS[self._take()](value, self._signed_power())
            else:
                if self._next[0].isdigit() and self._tokens[self._at - 1][0].isdigit():
                    raise Unreadable("two numbers side by side")
                value = self._mixed(value)

        if self._next == "|" and not self._bars:
            value = multiply(value, self._power())
        return multiply(Fraction(sign), value)

    def _mixed(self, value: Value) -> Value:
        r"""Returns a juxtaposed factor; after a whole number, `\frac12` makes a mixed number: 3\frac12 is 3.5."""
        before = self._tokens[self._at - 1]
        alone = self._at == 1 or self._tokens[self._at - 2] in ("+", "-", "(", "{", "[")
        is_mixed = self._next == "\\frac" and before.isdigit() and alone
        start = self._at
        factor = self._power()
        digits = [token for token in self._tokens[start + 1 : self._at] if token not in "{}"]
        if is_mixed and all(token.isdigit() for token in digits):
            return add(value, factor)
        return multiply(value, factor)

    def _signed_power(self) -> Value:
        if self._skip("-"):
            return multiply(Fraction(-1), self._power())
        return self._power()

    def _power(self) -> Value:
        value = self._atom()
        while self._next in ("!", "^", "'"):
            token = self._take()
            if token == "!":
                value = factorial(value)
            elif token == "'":
                raise Unreadable("derivative")
            elif self._degrees():
                value = multiply(value, mp.pi / 180)
            else:
                value = power(value, self._argument())

        return value

    def _degrees(self) -> bool:
        if self._next == "{" and self._ahead(1) == "\\circ" and self._ahead(2) == "}":
            self._at += 3
            return True
        return self._skip("\\circ")

    def _argument(self) -> Value:
        r"""Returns a group in braces, or one token: a digit of a number, as in \frac12 and x^23."""
        if self._skip("{"):
            value = self._sum()
            self._expect("}")
            return value
        token = self._next
        if token is not None and token[0].isdigit():
            if len(token) > 1:
                self._tokens = [
                    *self._tokens[: self._at],
                    token[0],
                    token[1:],
                    *self._tokens[self._at + 1 :],
                ]
            return Fraction(int(self._take()[0]))
        return self._nested(self._atom)

    def _nested(self, rule: Callable[[], Value]) -> Value:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("nested too deep")
        value = rule()
        self._depth -= 1
        return value

    def _atom(self) -> Value:
        token = self._take()
        closing = {"(": ")", "[": "]", "{": "}"}.get(token)
        if closing:
            outside = self._bars
            self._bars = 0
            value = self._sum()
            self._expect(closing)
            self._bars = outside
            return value

        if token[0].isdigit() or token[0] == ".":
            if len(token) > 400:
                raise Unreadable("number too large")
            return Fraction(token)

        if token == "|":
            self._bars += 1
            value = self._sum()
            self._expect("|")
            self._bars -= 1
            return abs(value)

        if token.isalpha() or _GREEK.fullmatch(token):
            return self._letter(token)
        if token in _FUNCTIONS:
            return self._nested(lambda: self._function(token))
        return self._nested(lambda: self._command(token))

    def _letter(self, token: str) -> Value:
        name = token
        if self._skip("_"):
            first = self._take()
            name += "_" + ("".join(iter(self._take, "}")) if first == "{" else first)

        if name == "e":
            return +mp.e
        if name == "i":
            return mp.mpc(0, 1)
        # I(0) and u(t) are functions' values, not products: another name.
        if self._next == "(" and self._ahead(2) == ")":
            name += "".join(self._tokens[self._at : self._at + 3])
            self._at += 3

        self.variables = True
        # A rational that depends on the name alone: no two names are likely to be related by a simple law.
        seed = zlib.crc32(f"{self._point}:{name}".encode())
        # Later points, of what is rounded, are large and every other one is whole.
        below = 997 + (seed >> 16) % 3001 if self._point % 2 or self._point <= POINTS else 1
        value = Fraction(1009 + seed % 8009, below) * 13 ** (self._point // 4)
        return -value if self._point > 1 and seed >> 9 & 1 else value

    def _function(self, token: str) -> Value:
        function = _FUNCTIONS[token]
        base = exponent = None
        if self._skip("_"):
            if token != "\\log":
                raise Unreadable("subscript of a function")
            base = self._argument()

        if self._skip("^"):
            exponent = self._argument()
        argument = real(self._function_argument())
        if exponent == -1 and token in ("\\sin", "\\cos", "\\tan"):
            function = _FUNCTIONS[f"\\arc{token[1:]}"]
            exponent = None

        if token in ("\\exp", "\\sinh", "\\cosh", "\\tanh") and abs(argument) > MAX_BITS:
            raise Unreadable("number too large")
        value = bounded(function(argument))
        if base is not None:
            value = divide(value, mp.log(real(base)))
        return value if exponent is None else power(value, exponent)

    def _function_argument(self) -> Value:
        r"""Returns a group; else what is juxtaposed: \sin 2x\cos x is \sin(2x) times \cos(x)."""
        if self._next == "(":
            return self._atom()
        if self._next in ("[", "{"):
            return self._power()
        value = self._power()
        while self._next is not None and self._next not in _ENDS and self._next not in _FUNCTIONS:
            if self._next in ("(", "["):
                break
            value = multiply(value, self._power())
        return value

    def _command(self, token: str) -> Value:
        if token == "\\frac":
            numerator = self._argument()
            return divide(numerator, self._argument())

        if token == "\\binom":
            upper = self._argument()
            lower = self._argument()
            if not (is_small_whole(upper) and is_small_whole(lower)):
                raise Unreadable("binomial out of bounds")
            return Fraction(comb(int(upper), int(lower)))

        if token == "\\sqrt":
            index: Value = Fraction(2)
            if self._skip("["):
                index = self._sum()
                self._expect("]")
            return root(self._argument(), index)

        if token == "\\pi":
            return +mp.pi
        if token in ("\\lfloor", "\\lceil"):
            value = self._sum()
            self._expect("\\rfloor" if token == "\\lfloor" else "\\rceil")
            if not isinstance(value, Fraction):
                raise Unreadable("rounding of a number that is not rational")
            self.rounded = True
            return Fraction(value.__floor__() if token == "\\lfloor" else value.__ceil__())

        if token == "\\text" and self._ahead(2) == "}":  # \text{e}
            return self._argument()
        raise Unreadable(f"unexpected {token!r}")

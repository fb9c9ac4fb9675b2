"""Expand the words of a script: variables, arrays, quotes, arithmetic.  Nothing is executed.

A value that only the machine of the run knows (a variable that the script does not set, the output
of a program) is kept in the text as a marker, see `unknown`; `names_of_unknown` finds it again.

Decide the conditions of a script: `[ ... ]` and `[[ ... ]]`.
"""

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipemega.compat.megatron.shell_syntax import Array, skip_quoted

_START, _END = "\x01", "\x02"
_MARKER = re.compile(f"{_START}([0-9a-f]*){_END}")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?$!-]")
_BRACED = re.compile(
    r"(?P<sharp>#)?(?P<bang>!)?(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[(?P<index>[^\]]*)\])?"
    r"(?P<rest>.*)",
    re.DOTALL,
)
_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Mod: operator.mod, ast.Pow: operator.pow, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_LARGEST_EXPONENT = 64


def unknown(name: str) -> str:
    """Return the marker of a value that the script does not determine."""
    # In hexadecimal: the text may be parsed again (eval, bash -c), and must stay one word.
    return f"{_START}{' '.join(name.split()).encode().hex()}{_END}"


def names_of_unknown(text: str) -> list[str]:
    """Return what is unknown in `text`: "$NAME", "$(command)"."""
    return [shown(found[0]) for found in _MARKER.finditer(text)]


def shown(text: str) -> str:
    """Return `text` with the markers as in the script: "$NAME"."""
    # A command within $(...) may contain markers of its own.
    while found := _MARKER.search(text):
        text = text[: found.start()] + bytes.fromhex(found[1]).decode() + text[found.end() :]
    return text


def within_unknown_folder(path: str) -> str | None:
    """Return NAME of `$(dirname "$0")/NAME` or `$FOLDER/NAME`; None if `path` has no such form."""
    found = re.fullmatch(f"{_MARKER.pattern}/([^{_START}]+)", path)
    return None if found is None else found[2]


@dataclass
class Scope:
    """The variables of a script, and the parameters of the script or of a function.

    Args:
        variables: texts; arrays as lists.
        parameters: $1, $2, ...
        run: returns the output of a command substitution.
        unset_is_empty: an unset variable is empty, as in a shell; False: its value is unknown.
    """

    variables: dict[str, str | list[str]]
    parameters: list[str] = field(default_factory=list)
    run: Callable[[str], str] = lambda command: unknown(f"$({command})")
    unset_is_empty: bool = False

    def get(self, name: str) -> str | list[str] | None:
        """Return a variable, None if it is not set."""
        if name in ("@", "*"):
            return list(self.parameters)
        if name == "#":
            return str(len(self.parameters))
        if name in ("?", "$", "!", "-"):
            return "0" if name == "?" else unknown(f"${name}")
        if name.isdigit() and 0 < int(name) <= len(self.parameters):
            return self.parameters[int(name) - 1]
        return self.variables.get(name)

    def assign(self, array: Array) -> None:
        """Set an array, or append to it."""
        values = [text for word in array.words for text in self.fields(word)]
        # Indices ([0]=a [1]=b) are dropped: scripts write them in order.
        values = [re.sub(r"^\[[^\]]*\]=", "", value) for value in values]
        old = self.variables.get(array.name, []) if array.append else []
        self.variables[array.name] = ([old] if isinstance(old, str) else old) + values

    def text(self, word: str) -> str:
        """Expand a word to one text, without splitting it."""
        return "".join("".join(parts) for parts in self._pieces(word, keep=True))

    def fields(self, word: str) -> list[str]:
        """Expand a word to the arguments that it becomes: none, one or several."""
        found, current, started = [], "", False
        for parts in self._pieces(word):
            for at, part in enumerate(parts):
                if at:  # a word ends between the elements of an array
                    if started:
                        found.append(current)
                    current, started = "", False
                literal = part.startswith("\x04")
                text = part.removeprefix("\x04")
                if literal:
                    current, started = current + text, True
                    continue
                if text[:1].isspace() and started:
                    found.append(current)
                    current, started = "", False
                split = text.split()
                for number, one in enumerate(split):
                    current, started = current + one, True
                    if number < len(split) - 1 or text[-1:].isspace():
                        found.append(current)
                        current, started = "", False
        return found + ([current] if started else [])

    def _pieces(self, word: str, quoted: bool = False, keep: bool = False) -> Iterator[list[str]]:
        """Yield the parts of a word; a quoted part starts with \\x04 and is not split.

        An array yields several texts at once. With `keep` the parts have no \\x04.
        """
        mark = "" if keep else "\x04"
        at = 0
        while at < len(word):
            char = word[at]
            ordinary = quoted and (char in "'\"" or word.startswith("$'", at))
            end = at if ordinary else skip_quoted(word, at)
            if char == "\\":
                following = word[at + 1 : at + 2]
                kept = quoted and following not in '"\\$`\n'
                yield [mark + (f"\\{following}" if kept else following.replace("\n", ""))]
                at += 2
            elif char == "'" and not quoted:
                yield [mark + word[at + 1 : end - 1]]
                at = end
            elif char == '"' and not quoted:
                inner = list(self._pieces(word[at + 1 : end - 1], quoted=True, keep=keep))
                yield from inner or [[mark]]
                at = end
            elif char in "$`":
                value, at = self._expansion(word, at, end, quoted)
                yield [mark + text if quoted else text for text in value]
            else:
                stop = at + 1
                while stop < len(word) and word[stop] not in "\\'\"$`":
                    stop += 1
                yield [mark + word[at:stop]]
                at = stop

    def _expansion(self, word: str, at: int, end: int, quoted: bool) -> tuple[list[str], int]:
        if word[at] == "`":
            return [self.run(word[at + 1 : end - 1].replace("\\`", "`"))], end
        if word.startswith("$((", at):
            return [self.arithmetic(word[at + 3 : end - 2])], end
        if word.startswith("$(", at):
            return [self.run(word[at + 2 : end - 1])], end
        if word.startswith("${", at):
            return self._braced(word[at + 2 : end - 1], quoted), end
        if word.startswith("$'", at) and not quoted:
            return [word[at + 2 : end - 1].replace("\\n", "\n").replace("\\t", "\t")], end
        name = _NAME.match(word, at + 1)
        if name is None:
            return ["$"], at + 1
        return self._braced(name[0], quoted), name.end()

    def _braced(self, inside: str, quoted: bool) -> list[str]:
        found = _BRACED.fullmatch(inside)
        if found is None:
            return [unknown(f"${{{inside}}}")]
        name, index, rest = found["name"], found["index"], found["rest"]
        if found["bang"]:
            pointer = self.get(name)
            name = pointer if isinstance(pointer, str) else name
        value = self.get(name)
        if name in ("@", "*") and index is None:
            index = name
        if found["sharp"]:
            return [str(len(value)) if value is not None else unknown(f"${{{inside}}}")]
        if isinstance(value, list):
            if index not in ("@", "*"):
                number = self.arithmetic(index or "0")
                at = int(number) if number.lstrip("-").isdigit() else -1
                value = value[at] if -len(value) <= at < len(value) else None
            elif rest.startswith(":"):
                first, _, count = rest[1:].partition(":")
                start = max(int(self.arithmetic(first) or 0) - (name in "@*"), 0)
                return value[start:][: int(count) if count.isdigit() else None]
            else:
                return [" ".join(value)] if index == "*" and quoted else list(value)
        elif value is not None and index not in (None, "0", "@", "*"):
            value = None
        return [self._modified(name, value, rest)]

    def _modified(self, name: str, value: str | None, rest: str) -> str:
        """Apply the modifier `rest` of ${NAME<rest>}."""
        if found := re.match(r":?([-=?+])", rest):
            other = rest[found.end() :]
            missing = value is None or (not value and rest[0] == ":")
            if found[1] == "+":
                return "" if missing else self.text(other)
            if not missing:
                return value or ""
            if found[1] == "?":
                return unknown(f"${name}")
            default = self.text(other)
            if found[1] == "=":
                self.variables[name] = default
            return default
        if value is None:
            return "" if self.unset_is_empty else unknown(f"${name}")
        if names_of_unknown(value) and rest:
            return unknown(f"${{{name}{rest}}}")
        return _edited(value, self.text(rest)) if rest else value

    def arithmetic(self, expression: str) -> str:
        """Return the value of $((expression)), or a marker if it is unknown."""
        text = self.text(expression)

        def value_of(found: "re.Match[str]") -> str:
            value = self.get(found[0])
            return value if isinstance(value, str) else unknown(f"${found[0]}")

        text = re.sub(r"(?<![\w\x01$.])[A-Za-z_]\w*(?![\w\x02])", value_of, text)
        if names := names_of_unknown(text):
            return unknown(names[0] if len(names) == 1 else f"$(({expression.strip()}))")
        number = calculate(text)
        return unknown(f"$(({expression.strip()}))") if number is None else str(int(number))


def calculate(text: str, integers: bool = True) -> float | int | None:
    """Return the value of an expression of numbers; None if it is something else.

    Args:
        integers: divide as a shell does; False: as with decimals.
    """
    python = text.replace("&&", " and ").replace("||", " or ").replace("^", "**")
    python = re.sub(r"(?<!/)/(?!/)", "//", python) if integers else python
    python = re.sub(r"(?<![\w.])0+(?=\d)", "", re.sub(r"!(?!=)", " not ", python)).strip()
    try:
        result: float | int = _value(ast.parse(python, mode="eval").body)
        return result
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow | ast.LShift) and right > _LARGEST_EXPONENT:
            raise ValueError("too large")
        return _BINARY[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp):
        value = _value(node.operand)
        return int(not value) if isinstance(node.op, ast.Not) else -value
    if isinstance(node, ast.BoolOp):
        test = all if isinstance(node.op, ast.And) else any
        return int(test([_value(part) for part in node.values]))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        compare = _BINARY[type(node.ops[0])]
        return int(compare(_value(node.left), _value(node.comparators[0])))
    if isinstance(node, ast.IfExp):
        return _value(node.body) if _value(node.test) else _value(node.orelse)
    raise ValueError("not an expression of numbers")


def _edited(value: str, rest: str) -> str:
    """Apply the modifier of ${NAME%pattern}, ${NAME/pattern/text}, ${NAME:offset}, ${NAME^^}."""
    if rest[:1] in "%#":
        longest = rest[1:2] == rest[0]
        pattern = rest[1 + longest :]
        lengths = range(len(value) + 1)
        for length in reversed(lengths) if longest else lengths:
            part = value[len(value) - length :] if rest[0] == "%" else value[:length]
            if fnmatch.fnmatchcase(part, pattern):
                return value[: len(value) - length] if rest[0] == "%" else value[length:]
        return value
    if rest[:1] == "/":
        every = rest[1:2] == "/"
        pattern, _, text = rest[1 + every :].partition("/")
        regex = fnmatch.translate(pattern)[:-2]  # without the end-of-text mark
        return re.sub(regex, lambda _: text, value, count=0 if every else 1)
    if rest[:1] == ":":
        first, _, count = rest[1:].partition(":")
        start = int(first) if first.strip().lstrip("-").isdigit() else 0
        return value[start:][: int(count)] if count.strip().isdigit() else value[start:]
    words = {"^^": value.upper(), ",,": value.lower(), "^": value[:1].upper() + value[1:]}
    return words.get(rest, value)


_NUMBERS: Mapping[str, Callable[[float, float], bool]] = {
    "-eq": lambda a, b: a == b, "-ne": lambda a, b: a != b, "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b, "-gt": lambda a, b: a > b, "-ge": lambda a, b: a >= b,
}  # fmt: skip
_WORD = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\$\{[^}]*\}|\$\([^)]*\)|[^\s()])+|[()]""")


def condition_result(condition: str, scope: Scope) -> bool | None:
    """Return whether the condition holds; None if that is unknown.

    Args:
        condition: the text between the brackets.
    """
    words = _WORD.findall(condition)
    return _any(words, scope)


def _any(words: list[str], scope: Scope) -> bool | None:
    """`a || b`, `a -o b`."""
    results = [_every(part, scope) for part in _split(words, ("||", "-o"))]
    return True if True in results else None if None in results else False


def _every(words: list[str], scope: Scope) -> bool | None:
    """`a && b`, `a -a b`."""
    results = [_one(part, scope) for part in _split(words, ("&&", "-a"))]
    return False if False in results else None if None in results else True


def _split(words: list[str], operators: tuple[str, ...]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    depth = 0
    for word in words:
        depth += (word == "(") - (word == ")")
        if word in operators and not depth:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _one(words: list[str], scope: Scope) -> bool | None:
    if words[:1] == ["!"]:
        result = _one(words[1:], scope)
        return None if result is None else not result
    if words[:1] == ["("] and words[-1:] == [")"]:
        return _any(words[1:-1], scope)
    if len(words) == 1:
        text = scope.text(words[0])
        return None if names_of_unknown(text) else bool(text)
    if len(words) == 2:
        return _of_one(words[0], scope.text(words[1]))
    if len(words) == 3:
        return _of_two(scope.text(words[0]), words[1], scope.text(words[2]))
    return None


def _of_one(test: str, text: str) -> bool | None:
    if names_of_unknown(text):
        # Text with an unknown part is still text.
        return {"-z": False, "-n": True}.get(test)
    if test in ("-z", "-n"):
        return bool(text) == (test == "-n")
    if test in ("-f", "-e", "-s", "-r"):
        return Path(text).is_file() or (test != "-f" and Path(text).exists())
    return Path(text).is_dir() if test == "-d" else None


def _of_two(left: str, test: str, right: str) -> bool | None:
    if names_of_unknown(left) or names_of_unknown(right):
        return None
    if test in _NUMBERS:
        try:
            return _NUMBERS[test](float(left or 0), float(right or 0))
        except ValueError:
            return None
    if test in ("=", "==", "!="):
        same = left == right or fnmatch.fnmatchcase(left, right)
        return same == (test != "!=")
    if test == "=~":
        try:
            return re.search(right, left) is not None
        except re.error:
            return None
    return {"<": left < right, ">": left > right}.get(test)

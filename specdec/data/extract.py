"""The contribution of one Python file to each domain of the corpus: its code, its prose, its tables."""

import ast
import re
import warnings
from itertools import groupby

MIN_BYTES, MAX_BYTES = 200, 300_000
_GENERATED = re.compile(r"auto-?\s?generated|generated (by|from|automatically)|do not edit", re.IGNORECASE)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)
_DISPLAYS = (ast.Dict, ast.List, ast.Tuple, ast.Set)
_LEGAL = re.compile(r"copyright|licen[sc]e|spdx", re.IGNORECASE)


def clean(raw: bytes) -> str | None:
    """The text of a file, or None for a file that is not used.

    Refused are files under 200 or over 300 000 bytes, not in UTF-8, with more than 10 % outside ASCII (a vocabulary of 4096
    has no room for other scripts), with a header that says "generated", or with lines too long to have been typed.
    """
    if not MIN_BYTES <= len(raw) <= MAX_BYTES:
        return None
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        return None
    lines = text.split("\n")
    typed = "\0" not in text and max(map(len, lines)) <= 1000 and len(text) <= 120 * len(lines)
    return text if typed and len(text) >= 0.9 * len(raw) and not _GENERATED.search(text[:600]) else None


def parse(text: str) -> ast.Module | None:
    """The syntax tree, or None if this interpreter cannot parse the text (old syntax, templates)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def prose(text: str, tree: ast.Module) -> str:
    """Docstrings and comment blocks of at least 80 characters, in file order, blank lines between.

    Legal headers are left out: every file of a package carries the same one. A '#' inside a string is not a
    comment; the strings' line ranges come from the tree, which is much faster than `tokenize`.
    """
    pieces: list[tuple[int, str]] = []
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Constant, ast.JoinedStr)):
            # The closing line may carry a comment, but never begins with one.
            inside.update(range(node.lineno, node.end_lineno or 0))
        elif isinstance(node, _DOCUMENTED) and (doc := ast.get_docstring(node)):
            pieces.append((node.body[0].lineno, doc))
    numbered = enumerate(map(str.strip, text.split("\n")), 1)
    for comment, lines in groupby(numbered, lambda at: at[1].startswith("#") and at[0] not in inside):
        block = list(lines)
        if comment and len(block) > 1:
            words = "\n".join(line.lstrip("#!:").removeprefix(" ") for _, line in block)
            pieces.append((block[-1][0] + 1, words))
    kept = [piece for _, piece in sorted(pieces) if len(piece) >= 80 and not _LEGAL.search(piece)]
    return "\n\n".join(kept)


def tables(text: str, tree: ast.Module, minimum: int = 24) -> str:
    """Statements whose value is a large literal collection (`minimum` constants or more, nine leaves in ten
    constant), as whole source lines with their indentation removed, blank lines between."""
    lines = text.split("\n")
    kept: list[str] = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, _STATEMENTS) and _is_table(node.value, minimum):
            rows = lines[node.lineno - 1 : node.end_lineno]
            indent = len(rows[0]) - len(rows[0].lstrip())
            kept.append("\n".join(row[indent:] if row[:indent].isspace() else row for row in rows))
        else:
            inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            stack += [*reversed(inner), *getattr(node, "handlers", ())]
    return "\n\n".join(kept)


def _is_table(node: ast.AST | None, minimum: int) -> bool:
    """Whether an expression is a display made of constants, at any depth."""
    if not isinstance(node, _DISPLAYS):
        return False
    leaves = _leaves(node)
    constants = sum(isinstance(leaf, ast.Constant) for leaf in leaves)
    return constants >= minimum and (len(leaves) - constants) * 9 <= constants


def _leaves(node: ast.AST) -> list[ast.AST]:
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    if not isinstance(node, _DISPLAYS):
        return [node]
    inner = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
    return [leaf for child in inner for leaf in _leaves(child)]

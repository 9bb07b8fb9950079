"""Rules, suites of tests that try them, and their reports: a broken rule is an ``AssertionError`` that names the rule and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from specdec.arguments import name_of


class BrokenRule(AssertionError):
    """A part breaks a rule of its contract.

    Attributes:
        rule: the name of the rule. found: what was seen. remedy: what to change. part: the part's name.
    """

    def __init__(self, rule: Rule, found: str, remedy: str = ""):
        super().__init__(rule, found, remedy)
        self.rule, self.remedy, self.found, self.part = rule.name, remedy or rule.remedy, found, "the part"

    def __str__(self) -> str:
        return f"{self.part} breaks the rule {self.rule!r}: {self.found}. Remedy: {self.remedy}"


class NotTried(Exception):
    """Raised in a test that does not apply to a part; the message says why."""


@dataclass(frozen=True)
class Rule:
    """One sentence of a contract.

    Attributes:
        remedy: what to change in a part that breaks it. raised: the same where an exception in the part breaks it; by default ``remedy``.
    """

    name: str
    remedy: str
    raised: str = ""

    def require(self, kept: Any, found: str) -> None:
        """Raise ``BrokenRule`` unless ``kept``."""
        if not kept:
            self.broken(found)

    def broken(self, found: str) -> NoReturn:
        """Raise ``BrokenRule``."""
        raise BrokenRule(self, found)

    @contextmanager
    def errors(self, when: str) -> Iterator[None]:
        """A context in which an exception breaks this rule. ``when``: what was being done."""
        try:
            yield
        except (BrokenRule, NotTried):
            raise
        except Exception as error:
            raise BrokenRule(self, f"{when} raised {type(error).__name__}: {error}", self.raised) from error


@dataclass(frozen=True)
class Kept:
    """What a check returns if no rule is broken.

    Attributes:
        part: the part's name. rules: the names of the rules that it keeps. not_tried: test -> why it was left out.
    """

    part: str
    rules: tuple[str, ...]
    not_tried: dict[str, str]

    def __repr__(self) -> str:
        lines = [f"{self.part} keeps {len(self.rules)} rules: {', '.join(self.rules)}"]
        return "\n".join(lines + [f"not tried: {test} ({why})" for test, why in self.not_tried.items()])


@dataclass(frozen=True)
class Suite:
    """Tests for one kind of part, in the order in which they run: later tests rely on the rules of earlier ones.

    Attributes:
        kind: of part. tests: name -> the test, and the rules that it tries. An exception in the part breaks the first of these rules.
    """

    kind: str
    tests: dict[str, tuple[Callable[[Any], None], tuple[Rule, ...], tuple[Rule, ...]]] = field(
        default_factory=dict
    )

    def test(
        self, *rules: Rule, also: tuple[Rule, ...] = ()
    ) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
        """Decorator: add a test, a function of the case. The function's name is the test's."""

        def add(test: Callable[[Any], None]) -> Callable[[Any], None]:
            self.tests[test.__name__] = test, rules, also
            return test

        return add

    @property
    def names(self) -> tuple[str, ...]:
        """The tests, for ``only=`` and for ``pytest.mark.parametrize``."""
        return tuple(self.tests)

    @property
    def rules(self) -> dict[str, Rule]:
        """All rules by name."""
        return {rule.name: rule for _, rules, _ in self.tests.values() for rule in rules}

    def run(self, part: Any, case: Any, only: Collection[str] | None = None) -> Kept:
        """Try the rules on ``case``.

        Args:
            part: what is tried, for its name. only: the tests to run (``None``: all).
        Raises:
            BrokenRule: the first rule that is broken. ValueError: ``only`` names no test.
        """
        unknown = set(only or ()) - self.tests.keys()
        if isinstance(only, str) or unknown:
            raise ValueError(f"only is {only!r}: give some of {', '.join(self.names)}, in a list")
        part, kept = name_of(part), list[str]()
        left_out: dict[str, str] = {}
        for name, (test, rules, also) in self.tests.items():
            if only is not None and name not in only:
                continue
            try:
                with rules[0].errors(f"the part, in the test {name!r},"):
                    test(case)
            except NotTried as why:
                left_out[name] = str(why)
            except BrokenRule as broken:
                if broken.rule in {rule.name for rule in rules + also}:
                    broken.part = part
                    raise
                # Kept in earlier tests: it is what this test does that breaks it.
                own = BrokenRule(rules[0], f"in the test {name!r} {broken.found}")
                own.part = part
                raise own from broken
            else:
                kept += [rule.name for rule in rules if rule.name not in kept]
        return Kept(part, tuple(kept), left_out)


def lacks(part: Any, *methods: str) -> list[str]:
    """The methods that a part does not have."""
    return [name for name in methods if not callable(getattr(part, name, None))]


def instance(part: Any, kind: str) -> Any:
    """The part itself; raises TypeError for a class."""
    if isinstance(part, type):
        raise TypeError(f"{kind} is the class {part.__name__}: give an object, such as {part.__name__}()")
    return part

"""What parts declare, who reads it, and that a shortcut never stands in for a part that overrides what it stands for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.capabilities import DraftInfo, DraftPart, ModelInfo, SelectorInfo, VerifierInfo
from specdec.composition import Composition
from specdec.executors import Serial
from specdec.rng import Philox, seeds
from specdec.stop_rules import StopRules
from specdec.verifiers import FusedRejection

TARGET = sd.TableModel.random(5, order=1, seed=0)


class Short:
    """The four methods and nothing else."""

    def init(self, context, target_cache):
        return None

    def propose(self, state, context, budget, rng):
        return sd.Proposal.chain(
            torch.zeros(context.batch, int(budget.max()), dtype=torch.long), budget
        ), None

    def observe(self, state, round):
        return None

    def select(self, state, rows):
        return None


class Attributes(Short):
    name, trees, taps, revocable = "attributes", True, (1, 3), True

    def nodes(self, length):
        return 7 * length

    def join(self, state, other):
        return None


class Declared(Attributes):
    """``info`` counts, whatever the attributes say."""

    info = DraftInfo("declared", nodes=lambda length: 2)


@dataclass
class Wrapped(Short):
    inner: object

    @property
    def info(self):
        return replace(DraftInfo.of(self.inner), name="wrapped")


def test_a_draft_declares_by_a_value_by_attributes_or_not_at_all():
    assert DraftInfo.of(Short()) == DraftInfo("Short")
    assert DraftInfo.of(Short()).nodes(4) == 4
    info = DraftInfo.of(Attributes())
    assert (info.name, info.trees, info.taps, info.revocable) == ("attributes", True, (1, 3), True)
    assert info.nodes(2) == 14
    info = DraftInfo.of(Declared())
    assert (info.name, info.trees, info.taps, info.nodes(9)) == ("declared", False, (), 2)
    inner = Attributes()
    assert DraftInfo.of(Wrapped(inner)) == replace(DraftInfo.of(inner), name="wrapped")
    assert DraftInfo.of(Wrapped(Declared())) == replace(Declared.info, name="wrapped")


def test_an_info_of_another_kind_is_no_declaration():
    part = SimpleNamespace(info={"name": "metadata"}, full_information=True)
    assert SelectorInfo.of(part) == SelectorInfo(full_information=True)
    assert ModelInfo.of(None) == ModelInfo()


def test_an_info_that_is_never_read_is_refused():
    class Forgotten(Short):
        def info(self):
            return DraftInfo("forgotten", trees=True)

    class Class(Short):
        info = DraftInfo

    for part in (Forgotten(), Class()):
        with pytest.raises(TypeError, match=r"info of .* is a function or a class: declare a value"):
            sd.decoder(TARGET).draft(part)


def test_methods_that_a_wrapper_hands_on_are_found():
    class Wrapper:
        def __init__(self, inner):
            self._inner = inner

        def __getattr__(self, name):
            return getattr(self._inner, name)

    part = DraftPart.of(Wrapper(sd.drafts.Model(TARGET)))
    assert part.binds is part.joins is part.waits is part.draft
    assert all(p is None for p in (part.follows, part.arms, part.stacks))


def test_methods_are_found_once():
    part = DraftPart.of(Attributes())
    assert part.joins is part.draft
    assert part.reads_target  # by its taps
    assert all(p is None for p in (part.binds, part.follows, part.waits, part.arms, part.stacks))
    assert part.bound(TARGET, sd.Sampling()) is part.draft
    pool = DraftPart.of(sd.drafts.Pool((Short(), Attributes()), (0, 1)))
    assert pool.arms is pool.draft
    assert [member.info.name for member in pool.members] == ["Short", "attributes"]
    assert (pool.info.trees, pool.info.taps, pool.info.revocable, pool.info.nodes(1)) == (
        True,
        (1, 3),
        False,
        7,
    )


def test_minimal_parts_decode():
    decoder = sd.decoder(TARGET).draft(Short()).build()
    assert "draft Short" in repr(decoder)
    assert decoder.generate([[0], [1, 2]], 9, seed=0).stats.tokens == 18


def test_a_decoder_names_a_verifier_that_has_no_repr():
    class Mine:
        info, own = sd.VerifierInfo("mine", lossless=True), sd.Rejection()
        __call__ = lambda self, *given: self.own(*given)  # noqa: E731
        check = lambda self, *given: self.own.check(*given)  # noqa: E731
        for_draft = lambda self, rng: self.own.for_draft(rng)  # noqa: E731

    decoder = sd.decoder(TARGET).verifier(Mine()).build()
    assert ", mine, Serial()" in repr(decoder)
    assert "object at" not in repr(decoder)


def test_an_executor_takes_a_composition():
    parts = Composition(TARGET, sd.drafts.Model(TARGET, sd.Sampling(), 5), 3, sd.Sampling(), sd.Coupled())
    context = sd.Context.of([[0], [1, 2]], capacity=24)
    limits = StopRules(max_length=context.length + 12)
    ids = [[], []]
    for round in Serial().run(parts, context, Philox(seeds(3, 2)), limits):
        for b, row in enumerate(round.context.request.tolist()):
            ids[row] += round.verdict.tokens[b, : int(round.committed[b])].tolist()
    decoder = sd.decoder(TARGET).draft(sd.drafts.Model(TARGET), length=3).verifier(sd.Coupled()).build()
    assert isinstance(decoder, Composition)
    assert ids == decoder.generate([[0], [1, 2]], 12, seed=3, eos_token_id=()).ids


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("kind", [sd.Rejection, sd.BlockVerification, FusedRejection, sd.Coupled])
def test_a_verifier_with_a_rule_of_its_own_is_always_asked(kind, temperature):
    asked = []

    class Own(kind):
        def __call__(self, *args):
            asked.append(1)
            return super().__call__(*args)

    plain, own = VerifierInfo.of(kind()), VerifierInfo.of(Own())
    assert plain.compares_tokens
    assert plain.takes_logits == (kind is FusedRejection)
    assert not own.compares_tokens
    assert not own.takes_logits
    base = sd.decoder(TARGET).sampling(temperature=temperature).draft(sd.drafts.Model(TARGET), length=3)
    rounds = []
    said = base.verifier(Own()).build().generate([[0], [1, 2]], 8, seed=0, on_round=rounds.append).ids
    assert len(asked) == len(rounds)
    assert said == base.verifier(kind()).build().generate([[0], [1, 2]], 8, seed=0).ids


def test_a_chain_is_fast_only_where_the_class_says_so():
    def at_once(model):
        return sd.drafts.Model(model).bind(TARGET, sd.Sampling()).captured is not None

    class Own(sd.HFModel):
        """Might see anything."""

    class Same(sd.HFModel):
        """Vouches for itself."""

        fast_chain = "slots"

    class Around:
        """Passes on everything, ``fast_chain`` too, and has a ``score`` of its own."""

        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def score(self, *args, **named):
            return self.inner.score(*args, **named)

    model = tiny("llama", 0, torch.float32)
    for fast in (sd.HFModel(model, graphs="eager"), Same(model, graphs="eager")):
        assert at_once(fast)
    assert at_once(sd.models.Windowed(sd.HFModel(model, graphs="eager"), 8))
    for plain in (
        sd.HFModel(model),
        Own(model),
        Own(model, graphs="eager"),
        Around(sd.HFModel(model, graphs="eager")),
        sd.models.Windowed(sd.HFModel(model), 8),
        TARGET,
    ):
        assert not at_once(plain)

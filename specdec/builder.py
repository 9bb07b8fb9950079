"""Composition of a decoder by an immutable builder, whose ``build`` checks that the parts fit."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Unpack

import torch

from specdec import drafts, saved
from specdec.arguments import at_least, function, whole
from specdec.arm_policy import Arm, ArmPolicy, Reward
from specdec.capabilities import DraftInfo, DraftPart, ModelInfo, SelectorInfo, VerifierInfo
from specdec.cost.arms import ArmCosts
from specdec.custom_generate import CustomGenerate, Streamer
from specdec.decoder import Decoder
from specdec.drafts.coerce import ModelLike, as_model
from specdec.elsewhere import DRAFT, SAMPLING, refuse
from specdec.executors.contract import Executor
from specdec.executors.serial import Serial
from specdec.generation import Generation
from specdec.models.check import Loading
from specdec.parts import DraftLike, as_draft, made
from specdec.protocols import Draft, LanguageModel, Selector, Verifier
from specdec.sampling import Sampling, SamplingSettings
from specdec.serving.requests import Finished
from specdec.texts import StreamChunk
from specdec.verifiers.fused import FusedRejection
from specdec.verifiers.rejection import Rejection

LONGEST = 2**16 - 1
"""The longest path of a draft: keys of random decisions have 16 bits for the depth of a token."""


@dataclass(frozen=True)
class Builder:
    """Every method returns a new builder, so ``base.draft(a)`` and ``base.draft(b)`` fork safely."""

    _target: LanguageModel
    _draft: Draft[Any] = drafts.NoDraft()
    _length: int = 4
    _sampling: Sampling | None = None  # nothing was said
    _verifier: Verifier | None = None  # the default for the target's device
    _executor: Executor = Serial()
    _selecting: ArmPolicy | None = None

    def __repr__(self) -> str:
        return f"Builder({self._target!r}, draft {DraftInfo.of(self._draft).name}, ...): call build()"

    def draft(self, draft: DraftLike, length: int | None = None, **options: Unpack[Loading]) -> Builder:
        """The draft, and the longest path that it proposes in a round (default: 4, or the depth of a tree).

        A model (or it and its tokenizer), a hub id, a folder or a pocket model's name becomes ``drafts.Model``, a SPIRe draft
        ``drafts.Spire``, and a head, also the checkpoint of one of another project, ``drafts.Head``.

        Args:
            options: of ``HFModel.from_pretrained``, for a hub id or a folder (``dtype=``, ``device_map=``). Without a ``device_map`` the model goes to
                the target's device.
        Raises:
            TypeError: no draft, an option that does not exist, or options for a draft that is in memory already.
        """
        _known("draft", options, DRAFT, "draft", "length")
        draft = as_draft(draft, "draft", ModelInfo.of(self._target).device, self._target, **options)
        if length is None:
            length = DraftInfo.of(draft).longest or 4
        return replace(self, _draft=draft, _length=length, _selecting=None)

    def pool(
        self,
        arms: Mapping[str, DraftLike | Arm | None],
        selector: Selector[Any],
        length: int = 4,
        *,
        capacities: Mapping[str, int] | None = None,
        costs: ArmCosts | Literal["modelled", "wall"] = "modelled",
        reward: Reward | None = None,
        stacked: bool = False,
    ) -> Builder:
        """Several drafts, one of which a selector chooses for each row and round.

        Args:
            arms: name -> a draft, a model, ``Arm(draft, length)`` with a length of its own, or ``None``: do not speculate. Arms may
                share a draft.
            selector: from ``specdec.selectors``. length: of arms without one.
            capacities: rows that an arm may draft at once (default: any number).
            costs: seconds charged for a round: ``"modelled"`` (from the weights that a token uses; deterministic), ``"wall"`` (measured), or
                ``ArmCosts``. reward: ``Round -> [B]``, for selectors that learn from bounded rewards.
            stacked: draft together the rows of models that differ only in their weights (``drafts.Stacked``): one call serves all, but
                a row that changes its model is read again.
        Raises:
            TypeError: arms or capacities are no mapping, the selector lacks methods, or ``reward`` is no function.
            ValueError: there are no arms, ``costs`` is unknown, a capacity is below 0 or of an unknown arm, an arm is too long for its draft, or the selector needs a
                ``reward``.
        """
        made("selector", selector, "init", "select", "update")
        if not isinstance(arms, Mapping):
            raise TypeError(f"arms is a {type(arms).__name__}: give a mapping, {{'name': draft, ...}}")
        if capacities is not None and not isinstance(capacities, Mapping):
            raise TypeError(
                f"capacities is a {type(capacities).__name__}: give a mapping, {{'name': rows, ...}}, of some of the arms {', '.join(arms)}"
            )
        remedy = "an arm drafts at least 1 token (None is the arm that does not speculate)"
        at_least(1, "length", length, remedy)
        listed = ", ".join(arms)
        if not isinstance(costs, ArmCosts) and costs not in ("modelled", "wall"):
            raise ValueError(f"costs is {costs!r}: give 'modelled', 'wall', or an ArmCosts")
        function("reward", reward)
        if isinstance(costs, ArmCosts) and len(costs.draft) != len(arms):
            raise ValueError(f"costs has {len(costs.draft)} arms and there are {len(arms)}: {listed}")
        if not arms:
            raise ValueError("arms is empty: give at least one draft, or None for 'do not speculate'")
        wanted = SelectorInfo.of(selector)
        if wanted.arms is not None and wanted.arms != len(arms):
            raise ValueError(
                f"selector {selector!r} is made for {wanted.arms} arms and there are {len(arms)}: {', '.join(arms)}"
            )
        if wanted.full_information and reward is None:
            raise ValueError(
                f"selector {selector!r} learns from a reward of every arm, chosen or not, and no reward is set: give pool(..., "
                f"reward=function), where function(round) is a tensor [B, {len(arms)}]; or use a selector that learns from the chosen arm, "
                "such as EXP3"
            )
        for name, rows in (capacities or {}).items():
            whole(f"capacities[{name!r}]", rows)
        unknown = sorted((capacities or {}).keys() - arms.keys())
        if unknown or min((capacities or {}).values(), default=0) < 0:
            raise ValueError(
                f"capacities are {dict(capacities or {})}: give numbers >= 0 for arms of {', '.join(arms)}; an arm without a number takes any number of rows"
            )
        unique: list[Any] = []
        numbers, lengths = [], []
        for name, arm in arms.items():
            part, own = (arm.draft, arm.length) if isinstance(arm, Arm) else (arm, None)
            if part is None:
                numbers.append(-1)
                lengths.append(0)
                continue
            part = as_draft(part, f"arm {name!r}", ModelInfo.of(self._target).device, self._target)
            number = next((i for i, u in enumerate(unique) if _same(part, u)), len(unique))
            unique += [part] if number == len(unique) else []
            numbers.append(number)
            longest, asked = DraftInfo.of(part).longest, length if own is None else own
            lengths.append(asked if longest is None else min(asked, longest))
            _possible(part, lengths[-1] if own is None else own)
        held = None if capacities is None else tuple(capacities.get(name, 2**31) for name in arms)
        charged = (
            ArmCosts.of(self._target, [unique[d] if d >= 0 else None for d in numbers])
            if costs == "modelled"
            else costs
        )
        how = ArmPolicy(selector, tuple(arms), tuple(lengths), held, charged, reward)
        parts = _stacked(self._target, unique, numbers) if stacked else (tuple(unique), tuple(numbers))
        pool = replace(drafts.Pool(*parts), timed=costs == "wall")
        return replace(self, _draft=pool, _length=max(1, *lengths), _selecting=how)

    def sampling(self, sampling: Sampling | None = None, **settings: Unpack[SamplingSettings]) -> Builder:
        """How tokens are drawn: a ``Sampling``, or settings (``temperature=0.7, top_p=0.9``), beside which those given before stay."""
        if sampling is not None and settings:
            raise ValueError("sampling: give a Sampling object or settings, not both")
        if sampling is not None and not isinstance(sampling, Sampling):
            raise TypeError(
                f"sampling is {sampling!r}: give a Sampling object, or settings such as temperature=0.7"
            )
        known = [field.name for field in fields(Sampling)]
        for name, value in settings.items():
            if name not in known:
                refuse("sampling", {name: value}, SAMPLING, known, "setting")
        if sampling is None:
            sampling = replace(self._sampling or Sampling(), **settings) if settings else self._sampling
        return replace(self, _sampling=sampling)

    def greedy(self) -> Builder:
        """The same as ``sampling(temperature=0)``."""
        return self.sampling(temperature=0)

    def verifier(self, verifier: Verifier) -> Builder:
        """How proposed tokens are verified: ``Rejection()`` (default; ``FusedRejection()``, which decides alike, on a GPU), ``Traversal()``,
        ``Coupled()``, or another of ``specdec.verifiers``."""
        made("verifier", verifier, "__call__", "check", "for_draft")
        return replace(self, _verifier=verifier)

    def executor(self, executor: Executor) -> Builder:
        """The order in which the parts run (default ``Serial()``)."""
        made("executor", executor, "run")
        return replace(self, _executor=executor)

    def generate(self, *arguments: Any, **named: Any) -> Generation:
        """``build().generate(...)``, to compose and decode once; build once to decode several times."""
        return self.build().generate(*arguments, **named)

    def stream(self, *arguments: Any, **named: Any) -> Iterator[StreamChunk]:
        """``build().stream(...)``, as ``generate``."""
        return self.build().stream(*arguments, **named)

    def serve(self, *arguments: Any, **named: Any) -> Iterator[Finished]:
        """``build().serve(...)``, as ``generate``."""
        return self.build().serve(*arguments, **named)

    def as_generate(self, streamer: Streamer | None = None) -> CustomGenerate:
        """``build().as_generate(streamer)``."""
        return self.build().as_generate(streamer)

    def __call__(
        self, model: Any, input_ids: Any, seed: int | Sequence[int] | None = None, **model_kwargs: Any
    ) -> Any:
        """As ``as_generate()``, so that transformers takes the builder itself: ``model.generate(**batch, custom_generate=builder)``."""
        return self.build()(model, input_ids, seed=seed, **model_kwargs)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """``build().save(folder)``."""
        self.build().save(folder)

    def build(self) -> Decoder:
        """Check that the parts fit together and return the decoder.

        Raises:
            TypeError: the draft lacks methods, or the length is no whole number.
            ValueError: the length is below 1 or too long for the draft, vocabularies or tokenizers differ, a draft proposes trees and the target takes chains
                only, or draws siblings otherwise than the verifier demands, or a logits processor keeps state.
        """
        target, part = self._target, DraftPart.of(self._draft)
        for each in (part, *part.members):
            made("draft", each.draft, "init", "propose", "observe", "select")
        remedy = "a draft proposes at least 1 token (use drafts.NoDraft() for plain decoding)"
        at_least(1, "length", self._length, remedy)
        if self._length > LONGEST:
            raise ValueError(
                f"length is {self._length}: give at most {LONGEST}; drafts of more than a few dozen tokens do not pay"
            )
        if self._selecting is None:
            _possible(self._draft, self._length)
        if part.info.trees and not target.supports_trees:
            raise ValueError(
                f"draft {part.info.name!r} proposes trees but this target takes chains only (its family does, or invariant=True): use "
                "drafts.Model, or of a head drafts.Head(model, heads.Chain())"
            )
        verifier = default_verifier(ModelInfo.of(target).device) if self._verifier is None else self._verifier
        able = VerifierInfo.of(verifier)
        for each in part.members:
            if each.info.trees and not able.siblings:
                raise ValueError(
                    f"verifier {able.name!r} takes chains, and draft {each.info.name!r} proposes trees: use a draft of chains, or Traversal() or "
                    "Rejection(), which take trees"
                )
            if each.info.trees and each.info.siblings not in able.siblings:
                raise ValueError(
                    f"verifier {able.name!r} takes trees whose siblings are drawn {' or '.join(map(repr, able.siblings))}, and draft "
                    f"{each.info.name!r} declares {each.info.siblings!r}: use drafts.Tree(model, widths, siblings=...), which declares how it "
                    "draws them, or Traversal() or Rejection(), which take any siblings"
                )
        for each in part.parts:
            model = each.info.model
            if model is not None:
                _fits(target, model)
                if each.info.trees and not (model.supports_trees or each.info.once):
                    raise ValueError(
                        f"draft {each.info.name!r}: this model family takes chains only, so it cannot draft a tree: use drafts.Model"
                    )
        said = ModelInfo.of(target)
        sampling = self._sampling or Sampling()
        if said.generation_processors and not sampling.processors:
            warnings.warn(
                f"the target's generation_config asks for {said.generation_processors}, which transformers' generate would apply: give the "
                "processors to sampling(processors=...), or clear these settings",
                stacklevel=2,
            )
        if said.generation_sampling and self._sampling is None:
            settings = ", ".join(f"{name}={value}" for name, value in said.generation_sampling.items())
            warnings.warn(
                f"the target's generation_config asks for {said.generation_sampling}, which transformers' generate would apply: call "
                f"sampling({settings}), or set another sampling",
                stacklevel=2,
            )
        composed = Decoder(
            target,
            self._draft,
            self._length,
            sampling,
            verifier,
            selecting=self._selecting,
            executor=self._executor,
            unbound=self._draft,
        ).with_sampling(sampling)
        return replace(composed, sampling_is_set=self._sampling is not None)


def default_verifier(device: torch.device | None) -> Verifier:
    """The verifier of a decoder without one, whose target's logits are on ``device`` (``None``: the host)."""
    return FusedRejection() if device is not None and device.type == "cuda" else Rejection()


def _possible(draft: Draft[Any], length: int) -> None:
    """Raise ValueError for a length that the draft refuses."""
    limits = DraftPart.of(draft).limits
    if limits is not None:
        limits.check_length(length)


def _same(a: Any, b: Any) -> bool:
    """Whether two arms share a draft: the same object, or the same model with the same settings."""
    alike = type(a) is type(b) is drafts.Model
    return a is b or (alike and a.model is b.model and a.sampling == b.sampling and a.stop == b.stop)


def _stacked(target: LanguageModel, parts: list[Any], numbers: list[int]) -> tuple[Any, ...]:
    """Drafts, arms and members of a ``Pool`` in which models of one shape are one draft."""
    from specdec.models.stacked import StackedModel, shape_of, stackable

    kinds: dict[Any, list[int]] = {}
    for part in parts:
        if type(part) is drafts.Model:
            _fits(target, part.model)
    for i, part in enumerate(parts):
        alike = type(part) is drafts.Model and not part.stop and stackable(part.model)
        kinds.setdefault((shape_of(part.model), part.sampling) if alike else i, []).append(i)
    together: list[Any] = []
    at: dict[int, tuple[int, int]] = {-1: (-1, 0)}
    for group in kinds.values():
        at |= {i: (len(together), member) for member, i in enumerate(group)}
        one = parts[group[0]]
        model = StackedModel([parts[i].model for i in group]) if len(group) > 1 else None
        together.append(one if model is None else drafts.Stacked(model, one.sampling))
    return tuple(together), tuple(at[n][0] for n in numbers), tuple(at[n][1] for n in numbers)


def decoder(target: ModelLike, **options: Unpack[Loading]) -> Builder:
    """Start composing a decoder.

    Args:
        target: an ``HFModel``, a transformers model (or it and its tokenizer), a hub id, a folder, a pocket model's name, or a ``LanguageModel``.
        options: of ``HFModel.from_pretrained``, for a hub id or a folder (``dtype=``, ``device_map=``, ``graphs=`` ...). Without a ``device_map``
            the model goes to the GPU if there is one.
    Raises:
        TypeError: no model, an option that does not exist, or options for a model that is in memory already.
    """
    _known("decoder", options, {}, "target")
    if isinstance(target, drafts.Translated):
        raise TypeError("target is a Translated model, which is for drafts: give the model itself")
    return Builder(as_model(target, "target", **options))


def load(folder: str | os.PathLike[str], device_map: Any = None) -> Builder:
    """The decoder that ``decoder.save(folder)`` wrote, before ``build()``, so that its parts can be exchanged.

    Args:
        device_map: as for ``decoder``.
    Raises:
        FileNotFoundError: there is no saved decoder. ValueError: its recipe is damaged, or of another version of the library.
    """
    parts = saved.load(folder, device_map)
    sampling, how = parts.pop("sampling") or Builder._sampling, parts.pop("pool")
    return Builder(**{f"_{name}": part for name, part in parts.items()}, _sampling=sampling, _selecting=how)


def _known(function: str, options: Mapping[str, Any], elsewhere: Mapping[str, str], *own: str) -> None:
    """Raise TypeError for options that loading does not have."""
    known = Loading.__annotations__
    unknown = {name: value for name, value in options.items() if name not in known}
    if unknown:
        refuse(function, unknown, elsewhere, [*own, *known])


def _fits(target: LanguageModel, draft: LanguageModel) -> None:
    one, other = ModelInfo.of(target), ModelInfo.of(draft)
    ours, theirs = one.tokenizer, other.tokenizer
    if ours is not None and theirs is not None:
        a, b = ours.get_vocab(), theirs.get_vocab()
        if a != b:
            differ = sum(1 for token in a.keys() | b.keys() if a.get(token) != b.get(token))
            raise ValueError(
                f"target and draft have different tokenizers: {differ} of {len(a)} and {len(b)} tokens differ: give a draft with the target's "
                "tokenizer (padded vocabularies are fine), or drafts.Translated(draft, target.tokenizer)"
            )
    elif target.vocab_size != draft.vocab_size:
        raise ValueError(
            f"the target's vocabulary has {target.vocab_size} entries and the draft's {draft.vocab_size}, and without both "
            "tokenizers nothing shows that they pad the same vocabulary: pass HFModel(model, tokenizer) for both (a folder needs its tokenizer's files)"
        )
    if str(other.device) == "meta" != str(one.device):
        raise ValueError(
            f"the target is on {one.device or 'cpu'} and the draft on meta: its weights were never loaded; load them with "
            "HFModel.from_pretrained(..., device_map=...)"
        )

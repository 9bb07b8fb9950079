"""The cost of an arm's round: modelled by the weights read, or given.

For a round, a row is charged ``drafted * draft[arm] + verify``, where a tree drafts its nodes; an arm that drafts in one forward is charged ``draft[arm]`` once.
Modelled costs are in units of one verification pass, and measured ones in seconds. Only ratios matter to a selector.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specdec.capabilities import DraftInfo
from specdec.configs import setting
from specdec.cost.shapes import Shape


@dataclass(frozen=True)
class ArmCosts:
    """The costs of one row.

    Args:
        draft: for each arm, the cost of one drafted token, or, where ``once`` is true, of all that a round drafts. verify: a row's share of a verification. once:
            for each arm, whether it drafts in one forward; empty: none does.
    Raises:
        ValueError: a negative cost of drafting, none of verification, or ``once`` for another number of arms.
    """

    draft: tuple[float, ...]
    verify: float = 1.0
    once: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if self.once and len(self.once) != len(self.draft):
            raise ValueError(
                f"costs are of {len(self.draft)} arms, and once of {len(self.once)}: give one for each arm"
            )
        if self.verify <= 0 or min(self.draft, default=0) < 0:
            raise ValueError(
                f"costs are draft {self.draft}, verify {self.verify}: need draft >= 0 and verify > 0"
            )

    def seconds(self, arm: Tensor, drafted: Tensor) -> Tensor:
        """``[B]`` the charge for rows on arms ``arm`` that drafted ``drafted`` tokens."""
        forwards = drafted.where(~self._once[arm], drafted.clamp(max=1)) if self.once else drafted
        return forwards * self._draft[arm] + self.verify

    @cached_property
    def _once(self) -> Tensor:
        return torch.tensor(self.once)

    @cached_property
    def _draft(self) -> Tensor:
        return torch.tensor(self.draft, dtype=torch.float64)

    @staticmethod
    def of(target: Any, drafts: Sequence[Any]) -> ArmCosts:
        """A pass costs the weights that a token uses, in units of the target's. A draft without a model costs nothing, and one that reads the
        target's cache with the target's own weights (``drafts.MagicDec``) costs what the target does.

        Decoding few tokens at a time is bound by reading weights and, for small models, by the number of calls, which grows with the
        weights, too.
        """
        whole = used_weights(target)
        infos = list(map(DraftInfo.of, drafts))
        used = [target if info.reads_cache else info.model for info in infos]
        each = tuple(0.0 if whole == 0 else used_weights(model) / whole for model in used)
        return ArmCosts(each, once=tuple(info.once for info in infos))


def weights(model: Any) -> int:
    """The number of a model's parameters, or of the model that it wraps; 0 for a draft without a model."""
    module = _module(model)
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def used_weights(model: Any) -> float:
    """The parameters that one token uses: ``weights``, but of experts the share that a token chooses, where ``Shape`` knows the family."""
    module = _module(model)
    if module is None:
        return 0.0
    experts = sum(p.numel() for name, p in module.named_parameters() if "experts" in name.split("."))
    return weights(module) - experts * (1 - _chosen(module) if experts else 0)


def _module(model: Any) -> torch.nn.Module | None:
    """The module that a model is or wraps."""
    while model is not None and not isinstance(model, torch.nn.Module):
        model = setting(model, "model")
    return model


def _chosen(module: torch.nn.Module) -> float:
    """The share of experts that a token uses, of the first config, of the module or of one in it, that has experts; 1 if there is none."""
    for config in {id(c): c for m in module.modules() if (c := setting(m, "config")) is not None}.values():
        with suppress(TypeError, ValueError):
            found = Shape.of(config).experts
            if found is not None:
                return found.chosen / found.count
    return 1.0

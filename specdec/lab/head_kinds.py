"""The kinds of heads that recipes train: what each proposes, how it is weighted by depth, and a new one for any target."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.drafts.heads import (
    MTP,
    DFlash,
    DFlash2,
    Domino,
    DSpark,
    Eagle3,
    HeadModel,
    LiLiCorr,
    Medusa,
    Pard2,
    PEagle,
    XPress,
)
from specdec.drafts.heads.features import Tap
from specdec.models.fingerprint import unwrapped
from specdec.training.block_losses import ChoiceLoss, WithBlock
from specdec.training.forward import Blocks, Corrected
from specdec.training.losses import ByDepth, CATLoss, CombinedLoss, HardLoss, MixedLoss, reads, takes_blocks

LOGITS = 2**27
"""The most logits of a step that ``anchors`` allows: half a gigabyte in float32, of which a step holds several tensors."""


@dataclass(frozen=True)
class Kind:
    """A kind of head.

    Attributes:
        head: its class. k: how many tokens are drafted at once by default. length: ``(name, more)``, where ``from_target`` takes ``name=k + more``; ``None``:
            the head drafts any number. factor: of the loss from one depth to the next. own: a head's loss as its authors train it, of one depth, or of whole blocks where the factor is not that of ``ByDepth``. rounds: of ``Corrected``, for this
            loss. blocks: how many transformer layers the head has by default, at most a quarter of the target's; 0: it always has one. settings: of
            ``from_target``. takes: which of ``mask_token`` and ``vocabulary`` recipes give to ``new``.
    """

    head: type[HeadModel]
    k: int
    length: tuple[str, int] | None = None
    factor: float = 0.8
    own: Callable[[Any], Any] = lambda head: CombinedLoss(soft=1.0)
    blocks: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    takes: tuple[str, ...] = ()
    rounds: int = 0

    def new(
        self,
        target: Any,
        k: int = 0,
        blocks: int = 0,
        taps: Sequence[Tap] | None = None,
        seed: int = 0,
        mask_token: int | None = None,
        vocabulary: Sequence[int] | None = None,
    ) -> HeadModel:
        """An untrained head for a target, which uses the target's embedding and output matrix.

        Args:
            target: an ``HFModel`` or a transformers model. k: tokens of a block; 0: the kind's. blocks: of the head; 0: the kind's. taps: the layers that
                the head reads; ``None``: those of its class. seed: of the weights. mask_token: the id of slots without a token; ``None``: a vector of the
                head's own. vocabulary: the ids that the head proposes, with an output matrix of its own; ``None``: all.
        Raises:
            ValueError: blocks for a head that has always one, or as ``HeadModel.from_target``.
        """
        settings = dict(self.settings)
        for name, value in (("mask_token", mask_token), ("vocabulary", vocabulary)):
            if value is not None:
                settings[name] = value
        if vocabulary is not None:
            settings["own_head"] = True
        if self.length is not None:
            name, more = self.length
            settings[name] = (k or self.k) + more
        if blocks and not self.blocks:
            raise ValueError(f"blocks is {blocks}, and {self.head.__name__} has one block: leave it at 0")
        config = unwrapped(target).config.get_text_config()
        if self.blocks:
            settings["blocks"] = blocks or max(1, min(self.blocks, config.num_hidden_layers // 4))
        if self.head is DFlash2:
            settings["conv_group"] = math.gcd(16, config.hidden_size)
        if self.head is LiLiCorr:
            settings["heads"] = math.gcd(8, config.hidden_size)
        return self.head.from_target(target, taps, seed=seed, **settings)

    def loss(self, name: str, head: HeadModel) -> Any:
        """The loss of a head's blocks.

        Args:
            name: "mixed": ``MixedLoss(0.5)``, or its like for a head with a confidence; "own": that of the head's authors.
        Raises:
            ValueError: no such loss.
        """
        if name not in ("mixed", "own"):
            raise ValueError(f"loss is {name!r}: there are mixed and own")
        confident = CombinedLoss(soft=0.5, variation=0.5, confidence=1.0)
        mixed = confident if head.confident else MixedLoss(0.5)
        each = self.own(head) if name == "own" else mixed
        return each if isinstance(each, ByDepth) or takes_blocks(each) else ByDepth(each, self.factor)

    def forward(self, name: str, head: HeadModel, k: int, anchors: int) -> Blocks:
        """The forward for ``loss(name, head)``, of ``anchors`` blocks of ``k`` tokens."""
        return (
            Corrected(k, anchors, self.rounds)
            if "block" in reads(self.loss(name, head))
            else Blocks(k, anchors)
        )


FLASH = math.exp(-1 / 4)
TEXT = ByDepth(HardLoss(), FLASH)
XPRESS = ByDepth(CombinedLoss(hard=0.1, variation=0.9), FLASH)


def text(head: HeadModel) -> HardLoss:
    """The cross-entropy with the text."""
    return HardLoss()


BOTH = ("mask_token", "vocabulary")
KINDS = {
    "eagle3": Kind(
        Eagle3,
        5,
        blocks=1,
        settings={
            "norm_before_residual": True,
            "norm_before_fc": True,
            "norm_output": True,
            "own_head": False,
        },
        takes=("vocabulary",),
    ),
    "peagle": Kind(
        PEagle,
        5,
        ("depth", 0),
        blocks=4,
        settings={"norm_before_residual": True, "norm_before_fc": True, "own_head": False},
        takes=BOTH,
    ),
    "mtp": Kind(MTP, 5, own=text, settings={"head_norms": True}),
    "medusa": Kind(
        Medusa, 5, ("heads", 0), own=text, blocks=4, settings={"own_head": False}, takes=("vocabulary",)
    ),
    "dflash": Kind(DFlash, 7, ("block_size", 1), FLASH, text, 5, takes=BOTH),
    "dflash2": Kind(
        DFlash2,
        7,
        ("block_size", 1),
        FLASH,
        lambda head: WithBlock(ChoiceLoss(head.top_k), TEXT),
        5,
        takes=("mask_token",),
    ),
    "dspark": Kind(
        DSpark,
        7,
        ("block_size", 0),
        FLASH,
        lambda head: CombinedLoss(hard=0.1, variation=1.8, confidence=1.0),
        5,
        takes=BOTH,
    ),
    "domino": Kind(
        Domino, 7, ("block_size", 0), FLASH, lambda head: WithBlock(TEXT, TEXT, fades=True), 5, takes=BOTH
    ),
    "lilicorr": Kind(
        LiLiCorr,
        7,
        ("block_size", 1),
        FLASH,
        lambda head: WithBlock(ChoiceLoss(head.top_k, 0.25, 0.25, prefix=True), TEXT),
        5,
        takes=("mask_token",),
    ),
    "xpress": Kind(
        XPress,
        7,
        ("block_size", 1),
        FLASH,
        lambda head: WithBlock(XPRESS, XPRESS, 0.6, rounds=0.3),
        5,
        takes=BOTH,
        rounds=3,
    ),
    "jetspec": Kind(
        DFlash,
        7,
        ("block_size", 1),
        FLASH,
        lambda head: ByDepth(CombinedLoss(soft=1.0), 1.0),
        5,
        settings={"causal": True},
        takes=BOTH,
    ),
    "pard2": Kind(Pard2, 8, ("depth", 0), own=lambda head: CATLoss(), blocks=4, takes=("mask_token",)),
}
"""The library's heads, by the names that recipes give them. With a mask token ``heads.export`` has a layout for all of them but Medusa and PARD-2."""

RESERVED = re.compile(r"[<\[].*(reserved|unused)", re.IGNORECASE)


def named_token(said: str, tokenizer: Any) -> int | None:
    """The id that an option of a recipe names, as a number or as a token; ``None``: the tokenizer has no such token."""
    return int(said) if said.isdecimal() else tokenizer.get_vocab().get(said)


def mask_token_of(tokenizer: Any, target: Any) -> int | None:
    """An id for slots without a token, which no text has: the tokenizer's mask token, an id that it does not use, a token that it reserves, its unknown or
    its padding token.

    Returns:
        ``None``: it has none of these that the target's embedding tells from nothing.
    """
    table = unwrapped(target).get_input_embeddings().weight
    names = tokenizer.get_vocab()
    used = set(names.values())
    free = (token for token in range(len(table)) if token not in used)
    reserved = sorted(token for name, token in names.items() if RESERVED.match(name))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id != tokenizer.eos_token_id else None
    for token in (tokenizer.mask_token_id, *free, *reserved, tokenizer.unk_token_id, pad):
        if token is not None and token < len(table) and bool(table[token].any()):
            return int(token)
    return None


def anchors(vocab_size: int, k: int, batch: int, most: int = 256, passes: int = 1) -> int:
    """How many blocks of ``k`` tokens of each sequence a step can train: ``most``, or as many as keep the logits of its ``passes`` below ``LOGITS``, but at least 8."""
    return max(8, min(most, LOGITS // (batch * k * vocab_size * passes)))

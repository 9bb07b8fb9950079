"""An EAGLE-3 head as a checkpoint of SpecForge, which the engine SGLang serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.drafts.heads.eagle3 import Eagle3
from specdec.drafts.heads.formats.body import fields_of
from specdec.drafts.heads.formats.plan import EMBEDDING
from specdec.drafts.heads.formats.safeailab import NAMES
from specdec.drafts.heads.model import HeadModel

PLAIN = {
    "blocks": 1,
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_output": False,
    "norm_before_residual": False,
    "head_norms": False,
    "own_embedding": False,
}


def specforge_config(head: HeadModel) -> dict[str, Any]:
    """The ``config.json`` of a head that is bound to its target.

    Raises:
        TypeError: another head than ``Eagle3``. ValueError: SGLang computes something else: the head has more than one block, norms of EAGLE-3.1,
            a mask, windows, an embedding of its own, or layers other than 2, L // 2 and L - 3 of L; or the target's logits are more than a product.
    """
    if type(head) is not Eagle3:
        raise TypeError(
            f"head is a {type(head).__name__}: in the layout of SpecForge only an Eagle3 is written"
        )
    wrong = {name: head.settings[name] for name, value in PLAIN.items() if head.settings[name] != value}
    if wrong:
        name, value = next(iter(wrong.items()))
        raise ValueError(
            f"{name} is {value!r}: in the layout of SpecForge heads are written with {PLAIN[name]!r}; make the head so, or export it in that of "
            "speculators"
        )
    if head.mask is not None or any(head.settings["windows"] or ()):
        raise ValueError("the layout of SpecForge has no masks and no windows: export a head without them")
    blocks = head.config.num_target_layers
    usual = (2, blocks // 2, blocks - 3)  # where the config names layers, engines differ in what it means
    if head.taps != usual:
        raise ValueError(
            f"taps are {list(head.taps)}: in the layout of SpecForge heads are written with {list(usual)}; make the head with these"
        )
    ends = head.of_target
    if head.lm_head is None and (ends.output.bias is not None or ends.softcap):
        raise ValueError(
            "the target's logits have a bias or a soft cap, which the layout of SpecForge cannot express: make the head with own_head=True"
        )
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **fields_of(head.config, 1, False),
        "target_hidden_size": head.config.hidden_size,
        "draft_vocab_size": head.outputs,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }


def specforge_tensors(head: HeadModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with SpecForge's names, without the embedding, which is the target's, and with a map of the vocabulary in any case.

    Args:
        tensors: of the layout of speculators.
    """
    found = {name: tensor for name, tensor in tensors.items() if name != EMBEDDING}
    (theirs, ours) = next(iter(NAMES.items()))
    found = {
        theirs + name.removeprefix(ours) if name.startswith(ours) else name: t for name, t in found.items()
    }
    whole = {
        "d2t": torch.zeros(head.outputs, dtype=torch.long),
        "t2d": torch.ones(head.vocab_size, dtype=torch.bool),
    }
    return {**whole, **found}

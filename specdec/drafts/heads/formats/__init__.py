"""Checkpoints of other projects: one file a project, which says what its config and its tensors' names mean."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec.drafts.heads.features import Tap
from specdec.drafts.heads.formats.deepspec import DEEPSPEC
from specdec.drafts.heads.formats.domino import DOMINO
from specdec.drafts.heads.formats.fields import Fields
from specdec.drafts.heads.formats.files import config_of, tensors_of
from specdec.drafts.heads.formats.lilicorr import LILICORR
from specdec.drafts.heads.formats.medusa import MEDUSA
from specdec.drafts.heads.formats.pard2 import PARD2
from specdec.drafts.heads.formats.plan import Format, built
from specdec.drafts.heads.formats.safeailab import SAFEAILAB
from specdec.drafts.heads.formats.specforge import SPECFORGE
from specdec.drafts.heads.formats.speculators import SPECULATORS
from specdec.drafts.heads.formats.transformers import TRANSFORMERS
from specdec.drafts.heads.formats.xpress import XPRESS
from specdec.drafts.heads.formats.zlab import ZLAB
from specdec.drafts.heads.model import HeadModel
from specdec.forward.ends import Ends

FORMATS: tuple[Format, ...] = (
    SPECULATORS,
    SPECFORGE,
    DEEPSPEC,
    DOMINO,
    ZLAB,
    LILICORR,
    XPRESS,
    TRANSFORMERS,
    PARD2,
    SAFEAILAB,
    MEDUSA,
)
COUNTED_FROM_0 = (
    "target_layer_ids",
    "dflash_config.target_layer_ids",
    "eagle_config.eagle_aux_hidden_state_layer_ids",
)


def layout_of(config: Mapping[str, Any]) -> Format | None:
    """The layout that a ``config.json`` has; ``None``: of none that is known."""
    return next((one for one in FORMATS if one.takes(config)), None)


def read(
    folder: Path,
    model: Any,
    taps: Sequence[Tap] | None = None,
    ignore: Collection[str] = (),
    settings: dict[str, Any] | None = None,
) -> HeadModel:
    """The head of a checkpoint of another project, in its own precision, not bound yet.

    Args:
        model: the target, a transformers model. taps, settings: in place of the checkpoint's. ignore: fields of the config that are not read.
    Raises:
        FileNotFoundError: files are missing. ValueError: the layout is not known; or fields or tensors are missing, unknown or of another shape.
    """
    config = config_of(folder)
    found = layout_of(config)
    if found is None and (config.get("pard_token") or -1) >= 0:
        raise ValueError(
            f"{folder}: it is a language model that drafts in parallel (PARD), and no head: give it to .draft(...), or drafts.Parallel of it"
        )
    if found is None:
        raise ValueError(
            f"{folder}: no known layout of draft heads has architectures {config.get('architectures')} and model_type "
            f"{config.get('model_type')!r}: known are those of {', '.join(one.name for one in FORMATS)}"
        )
    theirs = model.config.get_text_config()
    replaced = () if taps is None else COUNTED_FROM_0  # where the last layer is refused
    fields = Fields(str(folder), config, ignore=(*ignore, *replaced))
    tensors = tensors_of(folder)
    plan = found.plan(fields, tensors, theirs.num_hidden_layers, theirs.vocab_size)
    unread = list(fields.unread())
    if unread:
        raise ValueError(
            f"{folder}: {found.name}'s config has fields that are not known here, {', '.join(unread)}: they may change what the head computes; "
            f"to read the head without them, give ignore={tuple(unread)!r}"
        )
    plan = replace(
        plan, taps=plan.taps if taps is None else taps, settings={**plan.settings, **(settings or {})}
    )
    return built(plan, tensors, str(folder), Ends.of(model))

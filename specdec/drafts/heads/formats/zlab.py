"""Checkpoints of z-lab: DFlash, which SpecForge, JetSpec and NeMo AutoModel write, too, and DFlash2. They have no embedding and no output matrix: the
target's are used.

Ids of layers are counted from 0: ``i`` is the output of block ``i + 1``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from specdec.drafts.heads.dflash import DFlash
from specdec.drafts.heads.dflash2 import DFlash2
from specdec.drafts.heads.formats.body import body_of, windows_of
from specdec.drafts.heads.formats.fields import Fields
from specdec.drafts.heads.formats.plan import Format, Plan
from specdec.drafts.heads.formats.speculators import CONVOLUTIONS

KINDS = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DFlashDraftModel": "dflash",
    "Qwen3DFlash2DraftModel": "dflash2",
}
"""Architectures -> ``projector_type``; NeMo AutoModel's have the model's family in their names."""
AUTOMODEL = ["Qwen3DFlashDraftModel"], ["Qwen3DFlash2DraftModel"]


def plan(fields: Fields, tensors: Mapping[str, Tensor], blocks: int, vocab_size: int) -> Plan:
    """As ``Format.plan``.

    Raises:
        ValueError: as ``flash``.
    """
    if KINDS[fields.need("architectures")[0]] == "dflash":
        return flash(fields, blocks, vocab_size, "dflash")[0]
    made, more = flash(fields, blocks, vocab_size, "dflash2")
    for name in ("input_embedding_scale", "output_multiplier"):
        more.only(name, 1.0)
    found = {name: more.need(theirs) for name, theirs in CONVOLUTIONS.items()}
    return replace(made, kind=DFlash2, settings={**made.settings, **found})


def flash(fields: Fields, blocks: int, vocab_size: int, projector: str) -> tuple[Plan, Fields]:
    """The plan of a DFlash block, and the fields of ``dflash_config``.

    Args:
        projector: the ``projector_type`` that some configs name.
    Raises:
        ValueError: the head is of a target with another number of blocks, or as ``body_of``.
    """
    more = fields.inside("dflash_config", needed=True)
    more.only("projector_type", None, projector)
    config = body_of(fields, vocab_size, blocks, windows=True)
    layers = config.num_hidden_layers
    settings = {**block_of(fields, more, layers), **sight_of(fields, more, layers)}
    return Plan(DFlash, config, taps_of(fields, more, layers, blocks), settings), more


def sight_of(fields: Fields, more: Fields, layers: int) -> dict[str, Any]:
    """The settings of DFlash for windows and directions, as z-lab's and SpecForge's code has them: a window contains the slot's own position, and layers
    with one are causal, unless ``is_causal`` or, in ``more``, vLLM's ``causal`` or JetSpec's ``causal_head`` says of all layers what they are.

    Raises:
        ValueError: as ``windows_of``; or these fields differ.
    """
    windows = windows_of(fields, layers)
    if windows is None and more.get("use_swa", False):  # as ModelOpt writes
        windows = [more.need("swa_window_size")] * layers
    said = {"is_causal": fields.get("is_causal")}
    said |= {f"{more.where}{name}": more.get(name) for name in ("causal", "causal_head")}
    said = {name: bool(value) for name, value in said.items() if value is not None}
    if fields.get("architectures") in AUTOMODEL and len(said) > 1:
        said.pop("is_causal", None)  # which is False there also for JetSpec
    if len(set(said.values())) > 1:
        raise ValueError(
            f"{fields.source}: {' and '.join(f'{name} is {value}' for name, value in said.items())}, and projects differ in which they read: give ignore= "
            "with the wrong one"
        )
    causal = next(iter(said.values()), None)
    return {
        "windows": windows,
        "windows_from": "slot",
        "windows_causal": causal is not False,
        "causal": bool(causal),
    }


def block_of(fields: Fields, more: Fields, layers: int) -> dict[str, int]:
    """The settings of DFlash that z-lab's config has. ``block_size`` is at its top level in older checkpoints and in ``more`` in newer ones."""
    size, inner = fields.get("block_size"), more.get("block_size")
    if None not in (size, inner) and size != inner:
        raise ValueError(
            f"{fields.source}: block_size is {size} and {more.where}block_size {inner}, and engines differ in which they read: give ignore= with the wrong one"
        )
    size = inner if size is None else size
    if size is None:
        size = fields.need("block_size")
    mask = more.get("mask_token_id", fields.get("mask_token_id"))
    return {"blocks": layers, "block_size": size, "mask_token": mask}


def taps_of(fields: Fields, more: Fields, layers: int, blocks: int) -> list[int]:
    """The taps: those of ``target_layer_ids``, or z-lab's default for a head of so many ``layers``.

    Raises:
        ValueError: the config names another number of the target's blocks.
    """
    made_for = fields.get("num_target_layers", blocks)
    if made_for != blocks:
        raise ValueError(
            f"{fields.source}: num_target_layers is {made_for}, and this target has {blocks} blocks: give the target of this head"
        )
    ids = more.get("target_layer_ids")
    if ids is None:
        gaps = max(layers - 1, 1)
        ids = [round(1 + i * (blocks - 4) / gaps) for i in range(layers)] if layers > 1 else [blocks // 2]
    return counted_from_0(ids, blocks, fields.source)


def counted_from_0(ids: Sequence[int], blocks: int, source: str) -> list[int]:
    """Taps from ids of layers that are counted from 0, where -1 is the embedding.

    Raises:
        ValueError: the last block is among them.
    """
    if blocks - 1 in ids:
        raise ValueError(
            f"{source}: it reads layer {blocks - 1}, the target's last, and libraries differ on whether before or after the final norm: give "
            f'taps= with {blocks} (before) or "final" (after) in its place'
        )
    return [i + 1 for i in ids]


ZLAB = Format(
    "z-lab/dflash",
    lambda config: config.get("architectures") in [[name] for name in KINDS],
    plan,
)

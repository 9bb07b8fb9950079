"""Checkpoints of XPress as its authors publish and vLLM reads them: z-lab's layout, and a refiner with names of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from specdec.drafts.heads.formats.fields import Fields
from specdec.drafts.heads.formats.plan import Format, Plan
from specdec.drafts.heads.formats.zlab import flash
from specdec.drafts.heads.xpress import XPress

NAMES = {
    "xpress_head.w1.": "refiner_head.token_embed.",
    "xpress_head.w2.": "refiner_head.readout.",
    "xpress_head.mix.L": "refiner_head.mix_l",
    **{f"xpress_head.mlp.{one}_proj.": f"refiner_head.mlp_{one}." for one in ("gate", "up", "down")},
    "xpress_head.": "refiner_head.",
}


def plan(fields: Fields, tensors: Mapping[str, Tensor], blocks: int, vocab_size: int) -> Plan:
    """As ``Format.plan``. How often an engine iterates, and over how many candidates, changes nothing here.

    Raises:
        ValueError: as ``zlab.flash``; or a reduced vocabulary, a refiner of other blocks, or an MLP whose width is no multiple of the rank.
    """
    made, _ = flash(fields, blocks, vocab_size, "xpress")
    fields.skip(
        "xpress_num_passes",
        "xpress_topc",
        "xpress_candidate_topc",
        "xpress_fused_kernel",
        "xpress_compile_head",
    )
    fields.only("xpress_block_size", made.settings["block_size"])
    fields.only("draft_vocab_size", made.config.vocab_size)
    rank, inner = fields.get("xpress_rank", 256), fields.get("xpress_mlp_hidden", 512)
    if rank < 1 or inner % rank:
        raise ValueError(
            f"{fields.source}: xpress_mlp_hidden is {inner} and xpress_rank {rank}, and here the first is a multiple of the second: use another checkpoint"
        )
    found = {
        "anchor_first": fields.get("sample_from_anchor", False),
        "rank": rank,
        "mlp_ratio": inner // rank,
    }
    return replace(made, kind=XPress, settings={**made.settings, **found}, names=NAMES)


XPRESS = Format(
    "XPress",
    lambda config: config.get("architectures") in (["Qwen3XPressModel"], ["DFlashQwen3XPressModel"]),
    plan,
)

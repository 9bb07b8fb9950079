"""DFlash checkpoints of transformers (``MuseGlimmerAssistantModel``). They have no embedding and no output matrix: the target's are used."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from specdec.drafts.heads.dflash import DFlash
from specdec.drafts.heads.formats.body import body_of
from specdec.drafts.heads.formats.fields import Fields
from specdec.drafts.heads.formats.plan import Format, Plan
from specdec.drafts.heads.formats.zlab import block_of, taps_of

NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


def plan(fields: Fields, tensors: Mapping[str, Tensor], blocks: int, vocab_size: int) -> Plan:
    """As ``Format.plan``.

    Raises:
        ValueError: as ``body_of``.
    """
    config = body_of(fields, vocab_size, blocks)
    layers = config.num_hidden_layers
    return Plan(
        DFlash, config, taps_of(fields, fields, layers, blocks), block_of(fields, fields, layers), NAMES
    )


TRANSFORMERS = Format(
    "transformers", lambda config: config.get("model_type") == "muse_glimmer_assistant", plan
)

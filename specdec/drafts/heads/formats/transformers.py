"""DFlash checkpoints of transformers (``MuseGlimmerAssistantModel``). They have no embedding and no output matrix: the target's are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from specdec.drafts.heads.dflash import DFlash
from specdec.drafts.heads.formats.body import SLIDING, body_of, windows_of
from specdec.drafts.heads.formats.fields import Fields
from specdec.drafts.heads.formats.plan import Format, Plan
from specdec.drafts.heads.formats.zlab import block_of, taps_of

NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


def plan(fields: Fields, tensors: Mapping[str, Tensor], blocks: int, vocab_size: int) -> Plan:
    """As ``Format.plan``.

    Raises:
        ValueError: as ``body_of``.
    """
    config = body_of(fields, vocab_size, blocks, windows=True)
    layers = config.num_hidden_layers
    settings: dict[str, Any] = block_of(fields, fields, layers)
    windows = windows_of(fields, layers, SLIDING, 2048)  # a saved config does not have its defaults
    if windows is not None:  # which do not count the slot itself
        windows = [None if window is None else window + 1 for window in windows]
    settings |= {"windows": windows, "windows_from": "slot", "windows_causal": False}
    return Plan(DFlash, config, taps_of(fields, fields, layers, blocks), settings, NAMES)


TRANSFORMERS = Format(
    "transformers", lambda config: config.get("model_type") == "muse_glimmer_assistant", plan
)

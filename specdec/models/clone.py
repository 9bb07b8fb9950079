"""A structural clone: a second model object on the same storage, so that the user's model is never modified."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedModel


def structural_clone(model: PreTrainedModel) -> Any:
    """A model of the same structure with its own modules and config, on the user's parameters and buffers.

    Rotary frequencies are copied, because dynamic scaling writes them in place.
    """
    shared: dict[int, Any] = {id(p): p for p in model.parameters()}
    shared |= {id(b): b for name, b in model.named_buffers() if "inv_freq" not in name}
    clone = copy.deepcopy(model, shared)
    clone.eval()
    config = clone.config
    config.use_cache = config.output_hidden_states = config.output_attentions = False
    config.return_dict = True
    return clone

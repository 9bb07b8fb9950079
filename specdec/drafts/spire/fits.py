"""Whether a SPIRe draft fits a target: its sizes, and the weights that it was made from."""

from __future__ import annotations

from typing import Any

from specdec.configs import setting
from specdec.models.fingerprint import check_made_for


def check_fits(draft: Any, target: Any) -> None:
    """Raise ValueError unless a ``SpireModel`` has the sizes of a transformers model, and was made from it, if its ``any_target`` is not set."""
    theirs, mine = target.config.get_text_config(), draft.body.config
    for name in ("hidden_size", "vocab_size"):
        if setting(theirs, name) != setting(mine, name):
            raise ValueError(
                f"the target's {name} is {setting(theirs, name)} and the draft's {setting(mine, name)}: the draft reads the target's activations; make it "
                "from this target with SpireModel.from_target"
            )
    if (blocks := theirs.num_hidden_layers) <= max(draft.layers):
        raise ValueError(
            f"the draft reads block {max(draft.layers)} of its target, and this target has 0 to {blocks - 1}: make a draft from this target with "
            "SpireModel.from_target"
        )
    if not draft.any_target:
        load = "SpireModel.from_pretrained(folder, any_target=True)"
        check_made_for("draft", draft.target, target, " with SpireModel.from_target", load)

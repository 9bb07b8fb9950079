"""The rows of SPIRe's figure 5 (arXiv 2504.06419) and controls that the paper lacks: initialisation, forward and loss of each draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specdec.drafts.spire import SpireModel
from specdec.pruning.layers import keep_layers
from specdec.training.forward import KPass, Parallel
from specdec.training.losses import HardLoss, MixedLoss


@dataclass(frozen=True)
class Variant:
    """A draft to train.

    Attributes:
        make: creates the untrained draft for a target. forward, loss: as for ``training.train``. paper: τ at a context of 512 (figure 5).
    """

    make: Callable[[Any], Any]
    forward: Any
    loss: Any
    paper: float | None = None


def small(target: Any) -> Any:
    """A new model of half the target's width and depth: the paper's vanilla draft, an eighth of the body's parameters."""
    config = target.config.to_dict()
    halves = ("hidden_size", "num_hidden_layers", "intermediate_size")
    config |= {name: config[name] // 2 for name in halves}
    config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    model = AutoModelForCausalLM.from_config(type(target.config).from_dict(config))
    model.generation_config = target.generation_config
    return model


def as_large(target: Any, layers: int) -> Any:
    """A new model with the target's embedding and ``layers`` of its blocks in size: as many parameters as a SPIRe draft's blocks."""
    config = type(target.config).from_dict(target.config.to_dict() | {"num_hidden_layers": layers})
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = target.generation_config
    return model


def last_blocks(target: Any, layers: int) -> Any:
    """The target's embedding, last blocks and head as an ordinary model: SPIRe without feedback and without activations."""
    count = target.config.num_hidden_layers
    return keep_layers(target, range(count - layers, count))


def variants(
    layers: int = 2, sinks: int = 1, window: int = 64, k: int = 4, weight: float = 0.5
) -> dict[str, Variant]:
    """Every row by name; ``spire`` is the full method, and each other SPIRe row changes one thing (``no_feedback_no_activations`` two).

    Args:
        layers: number of the target's layers that SPIRe copies. sinks, window: the mask of sparse drafts. k: passes of SPIRe's
            training, and tokens of a block. weight: of distillation in the mixed loss.
    """

    def spire(**settings: Any) -> Callable[[Any], Any]:
        settings = {"sinks": sinks, "window": window, **settings}
        return lambda target: SpireModel.from_target(target, layers, **settings)

    mixed, passes, sparse = MixedLoss(weight), KPass(k), Parallel(window, sinks)
    return {
        "spire": Variant(spire(), passes, mixed, 3.401),
        "distillation_only": Variant(spire(), passes, MixedLoss(1.0), 3.375),
        "no_feedback": Variant(spire(feedback=False), passes, mixed, 3.352),
        "random_init": Variant(spire(random=True), passes, mixed, 3.105),
        "hard_loss": Variant(spire(), passes, HardLoss(), 3.069),
        "no_feedback_no_activations": Variant(
            lambda target: last_blocks(target, layers), sparse, mixed, 2.959
        ),
        "no_sparse_kv": Variant(spire(window=None), passes, mixed),
        "vanilla": Variant(small, Parallel(), HardLoss(), 2.647),
        "windowed_vanilla": Variant(small, sparse, HardLoss()),
        "distilled_vanilla": Variant(small, Parallel(), mixed),
        "windowed_distilled_vanilla": Variant(small, sparse, mixed),
        "windowed_distilled_large": Variant(lambda target: as_large(target, layers), sparse, mixed),
    }


def started(variant: Variant, target: Any, seed: int) -> Any:
    """The untrained draft; ``seed`` sets its random weights."""
    torch.manual_seed(seed)
    return variant.make(target)

"""Pruning: the initial weights of a smaller model, or the entries of a smaller KV cache. All of it works on plain tensors."""

from specdec.pruning import budgets
from specdec.pruning.channels import channel_importance, channel_means, keep_channels
from specdec.pruning.each_layer import most_important
from specdec.pruning.h2o import H2O
from specdec.pruning.heads import head_importance, head_norms, keep_heads
from specdec.pruning.influence import block_influence, layer_influence
from specdec.pruning.keynorm import KeyNorm
from specdec.pruning.layers import first_layers, influential_layers, keep_layers, last_layers, spaced_layers
from specdec.pruning.pruner import Needs, Pruner
from specdec.pruning.random import Random
from specdec.pruning.sinks import StreamingLLM
from specdec.pruning.slots import gather, top
from specdec.pruning.snapkv import SnapKV
from specdec.pruning.tova import TOVA
from specdec.pruning.uniform import Uniform
from specdec.pruning.vocabulary import Trimmed, frequent_tokens, keep_tokens, token_counts
from specdec.pruning.weights import attention_weights

__all__ = [
    "H2O",
    "TOVA",
    "KeyNorm",
    "Needs",
    "Pruner",
    "Random",
    "SnapKV",
    "StreamingLLM",
    "Trimmed",
    "Uniform",
    "attention_weights",
    "block_influence",
    "budgets",
    "channel_importance",
    "channel_means",
    "first_layers",
    "frequent_tokens",
    "gather",
    "head_importance",
    "head_norms",
    "influential_layers",
    "keep_channels",
    "keep_heads",
    "keep_layers",
    "keep_tokens",
    "last_layers",
    "layer_influence",
    "most_important",
    "spaced_layers",
    "token_counts",
    "top",
]

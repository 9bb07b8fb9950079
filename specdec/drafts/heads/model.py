"""What all heads share: a target, its embedding and output matrix, and a reduced vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from specdec.arguments import at_least
from specdec.cache.slots import KVShape
from specdec.configs import setting
from specdec.drafts.heads.contract import Anchors, Pass
from specdec.drafts.heads.features import Features, Tap
from specdec.drafts.heads.kernels import Kernels
from specdec.drafts.heads.layers import config_like, initialise
from specdec.drafts.heads.stored import StoredHead
from specdec.drafts.heads.vocabulary import offsets, widened
from specdec.forward.ends import Ends
from specdec.masks import for_model
from specdec.models.clone import structural_clone
from specdec.models.fingerprint import check_made_for, fingerprint, unwrapped


class HeadModel(StoredHead):
    """The weights and the arithmetic of a head; ``drafts.Head`` decodes with it. A head derives from this class and defines ``read`` and ``step``.

    Args:
        config: of the head's body. ``vocab_size`` and ``num_target_layers`` are the target's.
        taps: the activations of the target that it reads (``features.Tap``).
        vocabulary: the ids of the target that it can propose, ascending; ``None``: all.
        mask: which positions of the text its queries see (a ``masks.Mask`` of positions, or a function); ``None``: all. If it has a reach,
            the KV cache has a constant size. In a block that attends in both directions, later positions of the block are always seen. It is for all
            layers: one that has a window besides sees what both show.
        own_embedding, own_head: whether the head has an embedding or an output matrix of its own; otherwise it uses the target's.
        target: the target's fingerprint; empty where it is unknown.
        settings: the derived class's own arguments, which are saved with it.
    Raises:
        ValueError: no taps, a wrong vocabulary, or a mask that ``masks.for_model`` refuses. TypeError: an argument that no class of the
            head has.

    Attributes:
        kv_layers: how many layers have keys and values. longest: the longest chain that it can propose, if there is a limit. block_slots: how many
            slots its first step asks for at most; 0: each step asks for one, or for none.
        leading: whether ``read`` gets each text's first token, too, as the ``following`` of a position before the first, whose activations are zeros; the positions of all passes are then
            one higher. marginal: whether no logits depend on tokens after the anchor; a subclass that adds such a dependence sets it to False. confident: whether it has the method ``confidence``. corrected: whether its first
            step computes logits of a whole block, which each step corrects by the tokens before, from the memo alone; it has the method ``uncorrected``. top_k: how many best tokens of each slot the correction chooses among; ``None``: it has no such choice.
        target_width: of the target's activations, where the head has another one.
        ends: the target's embedding, final norm and output matrix; ``None`` before ``bound``. kernels: what computes some parts faster while
            it decodes; ``drafts.Head`` chooses them.
    """

    kv_layers = 1
    block_slots = 0
    longest: int | None = None
    marginal = confident = corrected = leading = False
    target_width: int | None = None
    top_k: int | None = None
    supports_trees = True  # ``build`` asks every draft's model
    ends: Ends | None = None
    kernels: Kernels | None = None

    def __init__(
        self,
        config: LlamaConfig,
        taps: Sequence[Tap],
        *,
        vocabulary: Sequence[int] | Tensor | None = None,
        mask: Any = None,
        own_embedding: bool = False,
        own_head: bool = False,
        target: str = "",
        **settings: Any,
    ):
        super().__init__()
        mine = {name for kind in type(self).__mro__ for name in signature(kind).parameters}
        for name in settings:
            if name not in mine:
                raise TypeError(f"{type(self).__name__} has no argument {name!r}")
        if not isinstance(taps, Sequence) or isinstance(taps, str):
            raise TypeError(f"taps is {taps!r}: give a list of layers, such as [{taps!r}]")
        if not taps:
            raise ValueError("taps is empty: a head reads at least one layer of its target")
        if setting(config, "num_target_layers") is None:
            raise ValueError(
                "config lacks num_target_layers: give the number of the target's blocks, as layers.config_like(target) does"
            )
        self.config, self.taps, self.target = config, tuple(taps), target
        self.mask = None if mask is None else for_model(mask)
        self.settings = {"own_embedding": own_embedding, "own_head": own_head, **settings}
        self.d2t: Tensor | None
        self.register_buffer("d2t", None if vocabulary is None else offsets(vocabulary, config.vocab_size))
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if own_embedding else None
        self.lm_head = nn.Linear(width, self.outputs, bias=False) if own_head else None

    # -- what a head defines ---------------------------------------------------------------------------------------------

    def read(self, features: Features, go: Pass) -> Tensor | None:
        """Read committed positions: put their keys and values into ``go``, and return what is carried from each.

        Returns:
            ``[..., *]`` for positions ``[...]``; ``None`` if nothing is carried. Only the value of each row's last position is kept.
        """
        raise NotImplementedError

    def step(self, n: int, memo: Any, token: Tensor, at: Anchors) -> tuple[Tensor, Any]:
        """Logits for x_{a+1+n}, the token n + 1 positions after the anchors.

        Args:
            n: counted from 0. memo: what the step before returned; for ``n = 0`` what ``read`` carried from position ``a - 1``.
            token: ``[...]`` x_{a+n}, the token before.
        Returns:
            logits ``[..., outputs]``, and the memo of the next step. In a tree a memo is a tensor ``[..., *]`` or a named tuple of some.
        """
        raise NotImplementedError

    def confidence(self, n: int, memo: Any, token: Tensor) -> Tensor:
        """``[...]``: the logit of the probability that the token x_{a+1+n}, which is not drawn yet, will be accepted.

        Args:
            n, token: those that step n got. memo: the one that step n returned.
        """
        raise NotImplementedError

    def uncorrected(self, memo: Any) -> Tensor:
        """``[..., longest, outputs]``: the logits of the block before they are corrected, from the memo of any of its steps."""
        raise NotImplementedError

    @property
    def shapes(self) -> list[KVShape]:
        """Keys and values of each layer."""
        c: Any = self.config
        return [
            KVShape(c.num_key_value_heads, c.head_dim, c.head_dim, self.dtype, self.device)
        ] * self.kv_layers

    @classmethod
    def default_taps(cls, blocks: int) -> Sequence[Tap]:
        """The default taps for a target with so many blocks."""
        return ("final",)

    def initialise(self) -> None:
        """Give a new head its weights; the target's are copied afterwards."""
        initialise(self)

    def copy_ends(self, ends: Ends) -> None:
        """Copy the target's embedding and output matrix to a new head that has its own."""
        if self.embed_tokens is not None:
            self.embed_tokens.weight.copy_(ends.table.weight)
        if self.lm_head is not None:
            self.lm_head.weight.copy_(self.rows(ends))

    # -- what it can use -------------------------------------------------------------------------------------------------

    def embed(self, tokens: Tensor) -> Tensor:
        """The raw embedding ``[..., E]`` of ids ``[...]``, its own or the target's."""
        if self.embed_tokens is not None:
            return self.embed_tokens(tokens)
        return self.of_target.embed(tokens).to(self.dtype)

    def logits(self, x: Tensor, raw: bool = False) -> Tensor:
        """Logits ``[..., outputs]`` of normed outputs ``[..., E]``, by its own matrix or the target's head; ``raw``: without what some targets do to theirs."""
        if self.lm_head is not None:
            return self.product(x, self.lm_head)
        ends, fast = self.of_target, None if torch.is_grad_enabled() else self.kernels
        # Without a kernel the matrix is read here: a hook of the target's module sees the target's calls alone.
        product = None if fast is None or not fast.has(ends.output) else fast.product
        logits = ends.logits(x.to(ends.output.weight.dtype), product, raw).to(self.dtype)
        return logits if self.d2t is None else logits[..., self.ids]

    def product(self, x: Tensor, linear: Any) -> Tensor:
        """``linear(x)``, by a kernel where one was chosen for this linear layer when the head was bound to be decoded with."""
        return linear(x) if self.kernels is None else self.kernels.product(x, linear)

    @property
    def outputs(self) -> int:
        """How many ids it can propose."""
        return self.vocab_size if self.d2t is None else len(self.d2t)

    def rows(self, ends: Ends) -> Tensor:
        """``[outputs, E]`` the rows of the target's output matrix for the ids that it can propose."""
        return ends.output.weight[self.ids.to(ends.output.weight.device)]

    @property
    def of_target(self) -> Ends:
        """The target's embedding, final norm and output matrix.

        Raises:
            RuntimeError: the head has not been bound.
        """
        if self.ends is None:
            raise RuntimeError("the head has no target: use the copy that bound(target) returns")
        return self.ends

    # -- what runs it ----------------------------------------------------------------------------------------------------

    @property
    def ids(self) -> Tensor:
        """``[outputs]`` the target's id of each logit."""
        every = torch.arange(self.outputs, device=self.device)
        return every if self.d2t is None else every + self.d2t

    def widened(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary ``[..., V]``: -inf for ids that the head does not have."""
        return logits if self.d2t is None else widened(logits, self.d2t, self.vocab_size)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def device(self) -> torch.device:
        return _first(self).device

    @property
    def dtype(self) -> torch.dtype:
        return _first(self).dtype

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.parameters())
        return f"{type(self).__name__}(taps {list(self.taps)} of target {self.target}, {size / 1e6:.3g}M parameters)"

    def tapped(self, of: Callable[[int], Tensor]) -> dict[Tap, Tensor]:
        """The activations of its ``taps``; ``of(layer)`` gives the target's, of which the last block's are before the final norm."""
        return {
            tap: self.of_target.final(of(self.layer_of(tap))) if tap == "final" else of(tap)
            for tap in self.taps
        }

    def layer_of(self, tap: Tap) -> int:
        """The target's layer of a tap."""
        last: int = self.config.num_target_layers
        return last if tap == "final" else tap

    def with_ends(self) -> tuple[nn.Module, ...]:
        """Its modules, and those of the target that it uses."""
        ends = self.of_target
        return *self.modules(), ends.table, ends.norm, ends.output

    def bound(self, target: Any) -> Self:
        """A head with the same weights that uses the embedding, norm and output matrix of ``target``, an ``HFModel``, an ``OwnCache`` or a transformers model.
        If this head is on another device, it is a copy on the target's device.

        Raises:
            ValueError: as ``check_target``; or the target's ends are not known.
        """
        self.check_target(target)
        model = unwrapped(target)
        ends = Ends.of(model)
        if self.ends is None or self.ends.table is not ends.table:
            ends.check(structural_clone(model))
        where = ends.table.weight.device
        made = copy.copy(self) if self.device == where else copy.deepcopy(self).to(where)
        made.ends = ends
        return made

    def masked(self, mask: Any) -> Self:
        """A head with the same weights that sees less of the text, or, with ``None``, all of it.

        Args:
            mask: as for the class. The head was trained with another one, so it accepts less; its output stays exact.
        Raises:
            ValueError: the head has no keys and values, or a mask that ``masks.for_model`` refuses.
        """
        if mask is not None and not self.kv_layers:
            raise ValueError(
                f"a {type(self).__name__} has no keys and values: it sees no text, and needs no mask"
            )
        made = copy.copy(self)
        made.mask = None if mask is None else for_model(mask)
        return made

    def check_target(self, target: Any) -> None:
        """Raise ValueError unless this head fits ``target``: it has the target's sizes, its taps exist there, and it was made from it, if ``any_target`` is not set."""
        model = unwrapped(target)
        theirs = model.config.get_text_config()
        for name in ("hidden_size", "vocab_size"):
            mine, other = setting(self.config, name), setting(theirs, name)
            if name == "hidden_size" and self.target_width is not None:
                mine = self.target_width
            if mine != other:
                raise ValueError(
                    f"the target's {name} is {other} and the head's {mine}: make a head from this target"
                )
        blocks = theirs.num_hidden_layers
        wrong = [tap for tap in self.taps if tap != "final" and not 0 <= tap <= blocks]
        if wrong:
            raise ValueError(
                f"taps: layer {wrong[0]} does not exist; this target has 0 (the embedding) to {blocks}, and 'final' (after the final norm)"
            )
        if not self.any_target:
            check_made_for("head", self.target, model, "", "heads.load(folder, target, any_target=True)")
        if self.layer_of("final") != blocks:
            raise ValueError(
                f"the target has {blocks} blocks and the head was made for one with {self.layer_of('final')}: make a head from this target"
            )

    @classmethod
    def from_target(
        cls,
        target: Any,
        taps: Sequence[Tap] | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> Self:
        """A new head for a target, in its precision and on its device: random weights, and copies of the target's embedding and output
        matrix where it has its own.

        Args:
            taps: by default ``default_taps``. config: changes of the body's config, such as ``intermediate_size``. seed: of the weights.
            settings: arguments of the class.
        Raises:
            ValueError: as ``check_target`` and the class. TypeError: ``target`` is no model.
        """
        model = unwrapped(target)
        if not isinstance(model, PreTrainedModel):
            what = repr(target) if isinstance(target, str) else f"a {type(target).__name__}"
            raise TypeError(
                f"target is {what}: give an HFModel or a transformers model; of a name or a folder, HFModel.from_pretrained(...)"
            )
        at_least(0, "seed", seed, "give 0 or more")
        sizes = config_like(model, **(config or {}))
        taps = cls.default_taps(sizes.num_target_layers) if taps is None else taps
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = cls(sizes, taps, target=fingerprint(model), **settings)
            made.initialise()
        ends = Ends.of(model)
        with torch.no_grad():
            made.copy_ends(ends)
        made.tokenizer = setting(target, "tokenizer")
        return made.to(ends.table.weight.device, ends.table.weight.dtype).eval().bound(target)


def _first(module: nn.Module) -> Tensor:
    """``next(module.parameters())``, which takes longer than the operators that ask for a dtype in every step.

    Raises:
        StopIteration: there are no parameters.
    """
    todo: list[Any] = [module]
    while todo:
        module = todo.pop()
        for weight in module._parameters.values():
            if weight is not None:
                return weight
        todo += [child for child in reversed(module._modules.values()) if child is not None]
    raise StopIteration

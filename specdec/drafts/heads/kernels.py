"""C kernels for the parts of a head that decodes on the CPU: its products, and attention and MLP of a block in one call.

They are chosen once, when the head is bound, and are looked up by the part. A part is served if it and its own parts are exactly the
library's, without hooks. Everything else runs as it is written, as do gradients, prompts, other devices and other dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from specdec.drafts.heads.layers import MLP, Attention, Norm, Sublayers
from specdec.forward.block import Angles, Block
from specdec.forward.llama_c import small
from specdec.kernels.attention.native import lowered, prompt
from specdec.kernels.native import library
from specdec.kernels.native.blocks import Blocks
from specdec.kernels.native.narrow import CHANGED, Narrow
from specdec.kernels.native.ops import linear_takes, unchecked_linear

Served = tuple[Any, Any, list[int]]
"""A part for which there are kernels, what it is made of, and what identifies its weights."""

Copies = Callable[[Iterable[Tensor]], Narrow | None]
"""``Narrow`` or ``Narrow.where_exact``."""


class Product:
    """The product of one linear layer; ``copies``: makes a bfloat16 copy of its weight when it is first read.

    Attributes:
        narrow: the copy; ``None`` before it is read, and where there is none.
    """

    def __init__(self, linear: Any, copies: Copies | None):
        self.linear, self._copies = linear, copies
        self.narrow: Narrow | None = None

    def copied(self) -> None:
        """Note which weight was copied, and in which version."""
        self._weight = self.linear.weight
        self._version = _version(self._weight)

    def __call__(self, x: Tensor) -> Tensor | None:
        """``x [..., inputs]`` -> ``[..., outputs]``, or ``None`` where there is no kernel for this call."""
        flat, weight = x.reshape(-1, x.shape[-1]), self.linear._parameters.get("weight")
        if weight is None or weight.dtype != x.dtype or not small(flat) or flat.shape[1] != weight.shape[1]:
            return None
        outputs, copies, self._copies = weight.shape[0], self._copies, None
        if copies is not None:
            self.narrow = copies([weight])
            self.copied()
        if self.narrow is not None:
            # A bound head may be trained or replaced, and called, before another text begins.
            same = weight is self._weight and weight.dtype == torch.float32
            if not same or _version(weight) != self._version:
                return None
            weight = self.narrow[weight]
        elif not (weight.is_contiguous() and weight.is_cpu):
            return None
        return unchecked_linear(flat, weight, self.linear.bias).view(*x.shape[:-1], outputs)


def _version(weight: Tensor) -> int | None:
    """How many changes in place PyTorch has counted; ``None``: it counts none for this tensor."""
    return None if weight.is_inference() else weight._version


class Through:
    """``Sublayers.through`` in one call, and keys and values alone; ``copies``: as for ``Product``, of the weights that a call reads.

    Attributes:
        narrow: the copies; ``None`` before they are read, and where there are none.
    """

    def __init__(self, parts: Block, copies: Copies | None):
        self.parts, self._copies = parts, copies
        self.narrow: Narrow | None = None
        self._blocks: Blocks | None = None
        self.group = parts.query.out_features // parts.key.out_features

    def through(self, go: Any, layer: int, x: Tensor, normed: Tensor, angles: Angles) -> Tensor | None:
        """As ``Sublayers.through``, or ``None`` where there is no kernel for this call."""
        read, held = normed.reshape(-1, normed.shape[-1]), go.ring.buffers
        alike = x.shape[:-1] == normed.shape[:-1] and x.dtype == normed.dtype
        if held is None or not alike or not self._serves(read, angles) or prompt(go.plan, self.group):
            return None
        blocks = self._reading(self.parts.products)
        if not blocks.plain:
            return None
        out = x.reshape(len(read), -1).clone(memory_format=torch.contiguous_format)
        cos, sin = go.turns(angles)
        blocks(out, cos, sin, go.slots, held, [lowered(go.plan, None)], read=read, layer=layer)
        return out.view(x.shape)

    def keep(self, go: Any, layer: int, x: Tensor, angles: Angles) -> bool:
        """As ``Attention.keep``; False where there is no kernel for this call."""
        read, held = x.reshape(-1, x.shape[-1]), go.ring.buffers
        if held is None or not self._serves(read, angles):
            return False
        blocks = self._reading((self.parts.key, self.parts.value), keys_only=True)
        if not blocks.plain:
            return False
        cos, sin = go.turns(angles)
        blocks.remember(0, read, cos, sin, go.slots, held, normed=True, layer=layer)
        return True

    def _serves(self, read: Tensor, angles: Angles) -> bool:
        size = self.parts.size
        fits = read.shape[1] == self.parts.query.in_features and angles[0].numel() == len(read) * size
        return fits and small(read)

    def _reading(self, products: Iterable[Any], keys_only: bool = False) -> Blocks:
        """The kernel's blocks, with copies at least of these products' weights."""
        made = self._blocks
        if made is None or (made.keys_only and not keys_only):
            self.narrow = None if self._copies is None else self._copies(p.weight for p in products)
            made = self._blocks = Blocks([self.parts], self.narrow, keys_only)
        return made


class Kernels:
    """The kernels of one head.

    Args:
        modules: the head's parts, and its target's output matrix if it uses that. bf16_weights: as for ``HFModel``.
    Attributes:
        parts: what ``contract.Pass.kernels`` is in decoding.
    Raises:
        ValueError: ``bf16_weights`` is True, and there are no kernels, or bfloat16 would round some weights.
    """

    def __init__(self, modules: Iterable[nn.Module], bf16_weights: bool | None = None):
        self._all: list[Any] = list(modules)
        self._bf16_weights = bf16_weights
        self.parts: dict[nn.Module, Through] = {}
        self._products: dict[nn.Module, Product] = {}
        self._choose(self._served())
        if bf16_weights and not self._chosen:
            raise ValueError(
                "bf16_weights is True, and this head has no parts in C: the setting is for float32 heads on a CPU where "
                "specdec.kernels.native.reason() is None, with sizes that are multiples of 16; leave it None"
            )

    def __reduce__(self) -> Any:  # they are of these modules: a copy has none until it is bound
        return type(None), ()

    def product(self, x: Tensor, linear: Any) -> Tensor:
        """``linear(x)`` for ``x [..., inputs]``."""
        fast = self._products.get(linear)
        made = None if fast is None else fast(x)
        return linear(x) if made is None else made

    def has(self, linear: Any) -> bool:
        """Whether a kernel was chosen for this linear layer."""
        return linear in self._products

    def check(self) -> None:
        """Bring copies of weights up to date, and notice parts and weights that were replaced; called when texts begin.

        Raises:
            RuntimeError: bfloat16 copies were asked for, and would round now.
        """
        served = self._served()
        if served != self._chosen:
            self._choose(served)
            return
        kernels: list[Any] = [*self.parts.values(), *self._products.values()]
        if self._bf16_weights:  # also weights that nothing has read yet
            if not all(Narrow.where_exact([w]) for _, of, _ in served for w in _weights(of)):
                raise RuntimeError(CHANGED)
        elif not all(k.narrow.refresh() for k in kernels if k.narrow is not None):
            self._choose(served)
            return
        for product in self._products.values():
            if product.narrow is not None:
                product.copied()

    def _served(self) -> list[Served]:
        found: list[Served] = []
        for part in self._all:
            if isinstance(part, Sublayers):
                of = parts_of(part)
                if of is not None:
                    found.append((part, of, [id(t) for p in of.products for t in (p.weight, p.bias)]))
            elif library() is not None and _plain(part, nn.Linear) and linear_takes(part.weight, part.bias):
                found.append((part, part, [id(part.weight), id(part.bias)]))
        return found

    def _choose(self, served: list[Served]) -> None:
        """Weights are copied when they are first read. Whether copies of all would be exact is found out here, one at a time."""
        self._chosen, self.parts, self._products = served, {}, {}
        make: Copies = Narrow if self._bf16_weights else Narrow.where_exact
        for part, of, _ in served:
            copies = None if self._bf16_weights is False else make
            if self._bf16_weights or (copies is not None and part is not of):
                # A part reads copies of all its weights or of none.
                copies = copies if all(make([w]) for w in _weights(of)) else None
            if part is of:
                self._products[part] = Product(part, copies)
                continue
            self.parts[part] = self.parts[part.self_attn] = Through(of, copies)


def _weights(of: Any) -> list[Tensor]:
    """The weights of the products of a part."""
    return [p.weight for p in (of.products if isinstance(of, Block) else [of])]


def parts_of(module: nn.Module) -> Block | None:
    """What ``Sublayers.through`` computes with, or ``None`` where the kernels would not compute exactly that."""
    names = "self_attn", "mlp", "post_attention_layernorm"
    attention, mlp, after = (cast(Any, module._modules.get(name)) for name in names)
    if not (_plain(attention, Attention) and _plain(mlp, MLP) and _plain(after, Norm)):
        return None
    head_norms = attention.q_norm, attention.k_norm
    a, m = attention, mlp
    products = (a.q_proj, a.k_proj, a.v_proj, a.o_proj), (m.gate_proj, m.up_proj, m.down_proj)
    made = Block(0, None, *products[0], *head_norms, after, *products[1], a.size, a.size**-0.5, None)
    norms = [after, *(norm for norm in head_norms if norm is not None)]
    if len(norms) == 2 or not all(_plain(norm, Norm) and _scaled(norm) for norm in norms):
        return None
    if not all(_plain(p, nn.Linear) for p in made.products) or not _sized(made) or not Blocks.takes([made]):
        return None
    return made if len({m.weight.dtype for m in (*made.products, *norms)}) == 1 else None


def _scaled(norm: Norm) -> bool:
    """Whether a norm has the constant and the weight that the kernels read."""
    return norm.eps is not None and norm._parameters.get("weight") is not None


def _sized(b: Block) -> bool:
    """Whether all weights have the shapes that the kernels read: they know the sizes that the layers declare, and check no others."""
    inputs, query, key = b.query.in_features, b.query.out_features, b.key.out_features
    width, inner = b.out.out_features, b.gate.out_features
    if not key or query % key or key % b.size:
        return False
    shapes = [(query, inputs), (key, inputs), (key, inputs), (width, query)]
    shapes += [(inner, width), (inner, width), (width, inner)]
    right = all(p.weight.shape == shape for p, shape in zip(b.products, shapes))
    norms = [(norm, b.size) for norm in (b.query_norm, b.key_norm) if norm is not None]
    return right and all(norm.weight.shape == (size,) for norm, size in [(b.after, width), *norms])


def _plain(module: Any, kind: Any) -> bool:
    """Whether a module is exactly of this kind, so that nothing but its own ``forward`` runs."""
    if type(module) is not kind:
        return False
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))

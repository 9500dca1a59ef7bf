"""A LoRA adapter in memory, and the arithmetic on its effect.

The effect of an adapter on module m is the matrix `(alpha / rank) * B_m @ A_m`. It is never formed here: norms and
inner products of effects follow from r x r Gram matrices, because <B1 A1, B2 A2> = sum((B1^T B2) * (A1 A2^T)).

Files are `adapters.peft` and `adapters.llamacpp_format`; training is not this package's business.

Invariants of every `AdapterWeights`: each module exists in its base and has that module's shape; every matrix is
contiguous float32; every module has the adapter's rank, so that one scale holds for all.

Dimension letters: r rank, I input width of a module, O its output width.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from adapters.errors import MismatchedAdapter, NotFiniteAdapter
from adapters.shape import BaseShape, module_order

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class AdapterWeights:
    """Matrices of one adapter, checked against the base model that they adapt.

    Attributes:
        base: shape of the base model.
        rank: r of every module.
        alpha: the effect's scale is alpha / rank.
        matrices: module -> (A float32[r, I], B float32[O, r]), row order of the Hugging Face weights, in order of depth
            whatever order they were given in.

    Raises:
        MismatchedAdapter: an unknown module, a wrong shape or dtype, no module at all, or a rank or alpha that is not
            positive.
    """

    base: BaseShape
    rank: int
    alpha: float
    matrices: Mapping[str, tuple[F32, F32]]

    def __post_init__(self) -> None:
        if not self.matrices:
            raise MismatchedAdapter("adapter: holds no LoRA matrices; export it again from the trained model")
        if self.rank < 1 or not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise MismatchedAdapter(f"adapter: rank {self.rank} and alpha {self.alpha} must be positive")
        ordered = {}
        for module in sorted(self.matrices, key=module_order):
            n_out, n_in = self.base.module_shape(module)
            a, b = self.matrices[module]
            for name, matrix, expected in (("A", a, (self.rank, n_in)), ("B", b, (n_out, self.rank))):
                if matrix.shape != expected or matrix.dtype != np.float32:
                    raise MismatchedAdapter(
                        f"{module}: matrix {name} is {matrix.dtype}{list(matrix.shape)}, this base model needs "
                        f"float32{list(expected)}; use an adapter that was trained on this base"
                    )
            ordered[module] = (np.ascontiguousarray(a), np.ascontiguousarray(b))
        object.__setattr__(self, "matrices", ordered)

    @property
    def scale(self) -> float:
        """Factor of B @ A in every module's effect."""
        return self.alpha / self.rank

    def check_finite(self) -> None:
        """Raise NotFiniteAdapter if any matrix holds NaN or infinity, naming the first module."""
        for module, pair in self.matrices.items():
            for name, matrix in zip("AB", pair, strict=True):
                if not np.isfinite(matrix).all():
                    bad = int(matrix.size - np.isfinite(matrix).sum())
                    raise NotFiniteAdapter(
                        f"{module}: {bad} of {matrix.size} values of matrix {name} are NaN or infinite; "
                        "discard this adapter"
                    )

    def norm(self) -> float:
        """Frobenius norm of the effect over all modules taken together: sqrt(sum over modules of |effect|^2)."""
        return math.sqrt(max(0.0, inner_product(self, self)))

    def sha256(self) -> str:
        """Hash of base shape, rank, alpha and every matrix: equal exactly if two adapters are bit-identical."""
        digest = hashlib.sha256()
        header = {"base": dataclasses.asdict(self.base), "rank": self.rank, "alpha": float(self.alpha)}
        digest.update(json.dumps(header, sort_keys=True).encode())
        for module, (a, b) in self.matrices.items():
            digest.update(module.encode() + b"\0")
            digest.update(a.astype("<f4", copy=False).tobytes())
            digest.update(b.astype("<f4", copy=False).tobytes())
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far two adapters on one base are apart.

    Attributes:
        norm, other_norm: norms of the two effects.
        distance: norm of the difference of the effects.
        cosine: of the angle between the effects, in [-1, 1]; None if one of them has no effect.
        distance_by_module: norm of the difference on each module that either of them adapts.
    """

    norm: float
    other_norm: float
    distance: float
    cosine: float | None
    distance_by_module: dict[str, float]


def inner_product(x: AdapterWeights, y: AdapterWeights) -> float:
    """Frobenius inner product of two effects, summed over the modules that both adapt."""
    return math.fsum(_module_products(x, y).values())


def compare(x: AdapterWeights, y: AdapterWeights) -> Comparison:
    """Distance and angle between the effects of two adapters; ranks, alphas and modules may differ.

    Raises:
        MismatchedAdapter: they adapt bases of different shapes.
    """
    if x.base != y.base:
        raise MismatchedAdapter(
            f"cannot compare adapters of different bases ({x.base.arch}, {x.base.n_layers} layers of {x.base.n_embd} "
            f"against {y.base.arch}, {y.base.n_layers} layers of {y.base.n_embd})"
        )
    xx, yy, xy = _module_products(x, x), _module_products(y, y), _module_products(x, y)
    by_module = {
        module: xx.get(module, 0.0) + yy.get(module, 0.0) - 2.0 * xy.get(module, 0.0)
        for module in sorted(xx.keys() | yy.keys(), key=module_order)
    }
    norm, other_norm = math.sqrt(math.fsum(xx.values())), math.sqrt(math.fsum(yy.values()))
    cosine = None
    if norm > 0.0 and other_norm > 0.0:
        cosine = min(1.0, max(-1.0, math.fsum(xy.values()) / (norm * other_norm)))
    return Comparison(
        norm=norm,
        other_norm=other_norm,
        # Rounding can make the square of a zero distance slightly negative.
        distance=math.sqrt(max(0.0, math.fsum(by_module.values()))),
        cosine=cosine,
        distance_by_module={module: math.sqrt(max(0.0, square)) for module, square in by_module.items()},
    )


def _module_products(x: AdapterWeights, y: AdapterWeights) -> dict[str, float]:
    products = {}
    for module, (ax, bx) in x.matrices.items():
        if module in y.matrices:
            ay, by = y.matrices[module]
            gram_b: F64 = bx.T.astype(np.float64) @ by.astype(np.float64)  # [rx, ry]
            gram_a: F64 = ax.astype(np.float64) @ ay.T.astype(np.float64)  # [rx, ry]
            products[module] = x.scale * y.scale * float(np.sum(gram_b * gram_a))
    return products

"""Adaptive embedding and softmax: frequent tokens first, rarer ones in clusters of narrower vectors.

From Grave et al. 2017 and Baevski and Auli 2019, as in the code of Transformer-XL and SRU++: tokens are ordered by
frequency, and the softmax over the first cluster holds one more entry for each of the others.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.layers.axes import partitioned
from block_recurrent.layers.dropout import dropout
from block_recurrent.layers.heads import Head, cross_entropy, look_up, scores
from block_recurrent.layers.parameters import kernel, offset
from block_recurrent.layers.products import product
from block_recurrent.ranges import WHOLE_1


class Adaptive(Head):
    """A head of clusters that begin at 0 and at the cutoffs, the vectors of each `div_value` times narrower.

    Both ends share the tables, and with `tie_projections` also the projections between a cluster's width and the
    model's. `dropout` drops numbers of the clusters' own vectors, at both ends.
    """

    cutoffs: tuple[int, ...]
    div_value: int = 4
    tie_projections: bool = True
    dropout: float = 0.0

    def __post_init__(self):
        if not isinstance(self.cutoffs, Sequence) or not all(map(WHOLE_1.holds, self.cutoffs)):
            raise UserError(f"Adaptive.cutoffs is {self.cutoffs!r}: give whole numbers, such as (20000, 60000)")
        super().__post_init__()

    def tables(self, model: nn.Module) -> tuple[tuple[jax.Array, jax.Array], ...]:
        """Vectors [v_i e_i] and projection [e_i d] of each cluster."""
        edges = (0, *self.cutoffs, model.vocabulary_size)
        widths = [(model.embedding_dim or model.dim) // self.div_value**i for i in range(len(edges) - 1)]
        if list(edges) != sorted(set(edges)) or not all(widths):
            raise UserError(
                f"Adaptive: cutoffs {tuple(self.cutoffs)} must rise from above 0 to below the vocabulary's "
                f"{model.vocabulary_size}, and leave no cluster without width (here {widths})"
            )
        found = []
        for i, width in enumerate(widths):
            # Only the first cluster is wide enough to be split over a mesh.
            init = partitioned(model.embedding_init, "vocab", None if i else "embed")
            table = model.param(f"embedding_{i}", init, (edges[i + 1] - edges[i], width), jnp.float32)
            # Between what its two directions want where it is tied.
            init = partitioned(nn.initializers.xavier_uniform(), None, "embed")
            projection = model.param(f"embedding_projection_{i}", init, (width, model.dim), jnp.float32)
            found.append((table, projection))
        return tuple(found)

    def embed(self, tables: tuple, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
        x = 0.0
        for first, (table, projection) in zip((0, *self.cutoffs), tables, strict=True):
            inside = (tokens >= first) & (tokens < first + len(table))
            vectors = look_up(table, jnp.where(inside, tokens - first, 0)).astype(dtype)  # [b n e_i]
            vectors = product(dropout(self, vectors, self.dropout), projection.astype(dtype))
            x += jnp.where(inside[..., None], vectors, 0.0)
        return x

    @nn.compact
    def __call__(self, tables: tuple, features: jax.Array) -> tuple[tuple, tuple]:
        """Vectors of each token in each cluster [b n e_i]; table and bias of each cluster, then of their entries."""
        latents, weights = [], []
        for i, (table, projection) in enumerate(tables):
            outward = self.outward(i, projection, features.shape[-1]).astype(features.dtype)
            latents.append(dropout(self, product(features, outward), self.dropout))
            weights.append((table, offset(self, f"bias_{i}", len(table), "vocab")))
        entries = kernel(self, "clusters", (latents[0].shape[-1], len(self.cutoffs)), "embed", None)
        return tuple(latents), (*weights, (entries.T, offset(self, "clusters_bias", len(self.cutoffs))))

    def outward(self, i: int, projection: jax.Array, width: int) -> jax.Array:
        """The projection of features to cluster i, [d e_i]."""
        if not self.tie_projections:
            shape = (width, len(projection))
            return kernel(self, f"projection_{i}", shape, "embed", None, init=nn.initializers.xavier_uniform())
        if projection.shape[1] != width:
            raise UserError(
                f"Adaptive: features are {width} wide, embeddings {projection.shape[1]}: "
                "set tie_projections = False, or make the widths equal"
            )
        return projection.T

    def scores(self, latents: tuple, weights: tuple) -> tuple[jax.Array, list[jax.Array]]:
        """Of the first cluster's tokens and the other clusters, [b n v_0 + clusters]; within each other cluster."""
        shortlist, *tails, entries = weights
        first = jnp.concatenate([scores(latents[0], *shortlist), scores(latents[0], *entries)], axis=-1)
        return first, [scores(x, *tail) for x, tail in zip(latents[1:], tails, strict=True)]

    def logits(self, latents: tuple, weights: tuple) -> jax.Array:
        """The logarithms of all probabilities."""
        first, tails = self.scores(latents, weights)
        first, entries = jnp.split(jax.nn.log_softmax(first), self.cutoffs[:1], axis=-1)
        tails = [jax.nn.log_softmax(tail) + entries[..., i, None] for i, tail in enumerate(tails)]
        return jnp.concatenate([first, *tails], axis=-1)

    def losses(self, latents: tuple, weights: tuple, targets: jax.Array) -> jax.Array:
        first, tails = self.scores(latents, weights)
        cluster = sum((targets >= cutoff).astype(targets.dtype) for cutoff in self.cutoffs)
        loss = cross_entropy(first, jnp.where(cluster == 0, targets, self.cutoffs[0] + cluster - 1))
        for i, (cutoff, tail) in enumerate(zip(self.cutoffs, tails, strict=True), start=1):
            within = cross_entropy(tail, jnp.where(cluster == i, targets - cutoff, 0))
            loss += jnp.where(cluster == i, within, 0.0)
        return loss

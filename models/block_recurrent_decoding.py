"""One token at a time through the block-recurrent layer: nothing is shifted, and the states are projected once a block.

The decoding state of models/block_recurrent_transformer.py's layer is a ring of the window whose next place is the
position inside the block, so that a finished block lies in it in order; beside it

    older_keys, older_values [b h w k]   the block before, for the update of the states
    recurrent [b s d]                    the states of this block
    state_keys, state_values [b h s k]   their keys and values, where they are
    projected [b]                        already there

The states are projected by the first token of a block and updated by its last, in those rows alone.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from block_recurrent.layers.attention import attend, heads_first, holds_token, scaled
from block_recurrent.layers.axes import devices_along
from block_recurrent.layers.window import RING, is_ring, repeated, select_rows

State = dict[str, jax.Array]


class RecurrentDecoding:
    """The part of the layer that decodes, and the state in its two forms."""

    def for_decoding(self, state: State) -> State:
        """The state as decoding keeps it; the layer takes and returns either form."""
        if is_ring(state):
            return state
        place = state["position"]
        earlier = jax.vmap(lambda x, place: jax.lax.dynamic_slice_in_dim(x, self.window - place, self.window))
        in_ring = jax.vmap(lambda x, place: jnp.roll(x[self.window :], place, axis=0))
        return {
            **{name: heads_first(in_ring(state[name], place)) for name in ("keys", "values")},
            "filled": in_ring(holds_token(state["keys"]), place),
            "place": place,
            **{f"older_{name}": heads_first(earlier(state[name], place)) for name in ("keys", "values")},
            "recurrent": state["recurrent"],
            **{name: heads_first(state[name]) for name in ("state_keys", "state_values")},
            "projected": place > 0,
        }

    def from_decoding(self, state: State) -> State:
        """The state as training and saved streams have it."""
        if not is_ring(state):
            return state
        place = state["place"]
        in_block = jnp.arange(self.window) < place[:, None]  # [b w]
        latest = jax.vmap(lambda x, place: jax.lax.dynamic_slice_in_dim(x, place, 2 * self.window))
        found = {}
        for name in ("keys", "values"):
            older, ring = (heads_first(state[part]) for part in (f"older_{name}", name))  # [b w h k]
            block = jnp.where(in_block[:, :, None, None], ring, 0.0)
            found[name] = latest(jnp.concatenate([jnp.zeros_like(older), older, block], axis=1), place)
            vectors = heads_first(state[f"state_{name}"])
            found[f"state_{name}"] = select_rows(place == 0, 0.0, vectors)
        return {**found, "recurrent": state["recurrent"], "position": place}

    def token_by_token(self, cell: Mapping, tokens: Mapping, state: State, start: jax.Array) -> tuple[jax.Array, State]:
        """Attention [b n 2hk] for any length, from and to any place inside a block; a state of either form."""
        if start.shape[1] == 1 and is_ring(state):
            return self.decode(cell, tokens, state, start)
        in_time = jax.tree.map(lambda a: a.swapaxes(0, 1)[:, :, None], (dict(tokens), start))  # [n b 1 ...]

        def step(state, now):
            attended, state = self.decode(cell, now[0], state, now[1])
            return state, attended

        after, attended = jax.lax.scan(step, self.for_decoding(state), in_time)
        attended = attended[:, :, 0].swapaxes(0, 1)
        return attended, after if is_ring(state) else self.from_decoding(after)

    def decode(self, cell: Mapping, tokens: Mapping, state: State, start: jax.Array) -> tuple[jax.Array, State]:
        """Attention [b 1 2hk] of one token of every row, tokens [b 1 h k], and the decoding state after it."""
        state = self.renewed(cell, state, start[:, 0])
        ring = {name: state[name] for name in RING}
        in_window, ring = self.attend_tokens(cell, None, tokens, ring, start)  # which empties the ring at a start
        queries = heads_first(scaled(tokens["cross_queries"], cell["cross_scale"]))
        in_states = heads_first(attend(queries, state["state_keys"], state["state_values"]))
        attended = jnp.concatenate([a.reshape(*start.shape, -1) for a in (in_window, in_states)], axis=-1)
        return attended, self.ended(cell, {**state, **ring}, ring["place"] == 0)

    def renewed(self, cell: Mapping, state: State, start: jax.Array) -> State:
        """The decoding state before a token: rows with a start [b] emptied, states projected where a block begins."""
        projected = state["projected"] & ~start

        def renew(carried):
            # All of it depends on what the loop carries: what does not, XLA would take out of the loop and always do.
            recurrent = self.reset_at_starts(cell, start, carried["recurrent"])
            older = {name: select_rows(start, 0.0, carried[name]) for name in ("older_keys", "older_values")}
            seen = self.projections(cell, recurrent)
            new = {f"state_{name}": heads_first(seen[name]) for name in ("keys", "values")}
            new = {name: select_rows(projected, carried[name], vectors) for name, vectors in new.items()}
            return {"recurrent": recurrent, **older, **new}

        names = ("recurrent", "older_keys", "older_values", "state_keys", "state_values")
        return {
            **state,
            **repeated(~jnp.all(projected), renew, {name: state[name] for name in names}),
            "place": jnp.where(start, 0, state["place"]),
            "projected": jnp.ones_like(projected),
        }

    def ended(self, cell: Mapping, state: State, ends: jax.Array) -> State:
        """The decoding state after a token: the states updated in the rows [b] whose block ends with it.

        Rows of a batch whose prompts have different lengths end their blocks apart: a few are updated one by one.
        """
        block = {name: state[name] for name in ("keys", "values")}

        def update(carried, block):
            older = {name: carried[f"older_{name}"] for name in block}
            both = {name: jnp.concatenate([older[name], block[name]], axis=2) for name in block}  # [b h 2w k]
            recurrent = carried["recurrent"]
            after, _ = self.next_state(cell, recurrent, self.projections(cell, recurrent), **both)
            return {"recurrent": after, **{f"older_{name}": part for name, part in block.items()}}

        def update_all(carried):
            return jax.tree.map(lambda new, old: select_rows(ends, new, old), update(carried, block), carried)

        def update_one(number, carried):
            row = jnp.argsort(~ends, stable=True)[number]
            after = update(*jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, row, 1), (carried, block)))
            put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=row, axis=0)
            return jax.tree.map(lambda old, new: put(old, new.astype(old.dtype)), carried, after)

        count = jnp.sum(ends)
        one_by_one = len(ends) // 4 if devices_along("batch") == 1 else 0  # a row of several devices' is on one of them
        carried = {name: state[name] for name in ("recurrent", "older_keys", "older_values")}
        carried = repeated(count > one_by_one, update_all, carried)
        if one_by_one:
            carried = jax.lax.fori_loop(0, jnp.where(count <= one_by_one, count, 0), update_one, carried)
        return {**state, **carried, "projected": state["projected"] & ~ends}

"""The block-recurrent layer as a loop over tokens in float64: what models/block_recurrent_transformer.py must equal."""

import numpy as np

from tests.reference.sliding_window import (
    after_attention,
    attend_all,
    attend_states,
    attend_window,
    heads_of,
    is_empty,
    rms,
    unit,
    unit_heads_of,
)


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def apply_gate(params, name, old, new, hidden):
    if f"{name}_bias" in params:
        kept = sigmoid(params[f"{name}_bias"])
        return old * kept + new * (1 - kept)
    taken = sigmoid(hidden @ params[f"{name}_input_kernel"] + params[f"{name}_input_bias"] - 1)
    kept = sigmoid(hidden @ params[f"{name}_forget_kernel"] + params[f"{name}_forget_bias"] + 1)
    return old * kept + new * taken


def states_seen(layer, params, recurrent):
    """Keys, values and both sets of queries of one row's states: [s h k] each."""
    normed = np.stack([rms(vector, params["state_norm"]) for vector in recurrent]) + params["state_ids"]

    def project(name):
        return np.stack([heads_of(vector, params[f"state_{name}"], layer.heads) for vector in normed])

    def project_unit(name):
        return np.apply_along_axis(unit, -1, project(name))

    return project_unit("keys"), project("values"), project_unit("queries"), project_unit("cross_queries")


def new_value(layer, params, name, hidden):
    """z of a gate: eq. 1, and eq. 4 where the layer says so."""
    z = hidden @ params[name] + params.get(f"{name}_bias", 0.0)
    squashed = layer.configuration == "single" if layer.z_tanh == "single" else layer.gate == "lstm"
    return np.tanh(z) if squashed else z


def update(layer, params, recurrent, keys, values):
    """One row's states [s d] after a block, given the keys and values of two blocks [2w h k]."""
    state_keys, state_values, queries, cross_queries = states_seen(layer, params, recurrent)
    if layer.mask_empty:
        held = [j for j in range(len(keys)) if not is_empty(keys[j])]
        keys, values = keys[held], values[held]
    after = np.zeros_like(recurrent)
    for s, old in enumerate(recurrent):
        hidden = np.concatenate(
            [
                attend_all(queries[s], state_keys, state_values, np.abs(params["state_scale"])),
                attend_all(cross_queries[s], keys, values, np.abs(params["state_cross_scale"])),
            ]
        )
        if layer.configuration == "single":
            middle = np.maximum(hidden @ params["state_mlp_hidden"], 0.0)
            z = new_value(layer, params, "state_mlp_output", middle)
            after[s] = apply_gate(params, "state_mlp_gate", old, z, middle)
            continue
        after[s] = apply_gate(params, "state_gate", old, new_value(layer, params, "state_output", hidden), hidden)
        if layer.configuration == "dual":
            middle = np.maximum(rms(after[s], params["state_mlp_norm"]) @ params["state_mlp_hidden"], 0.0)
            z = new_value(layer, params, "state_mlp_output", middle)
            after[s] = apply_gate(params, "state_mlp_gate", after[s], z, middle)
    return after


def block_recurrent_layer(layer, params, x, state, start, shown=None):
    """y, state of BlockRecurrentLayer `layer` on x [b n d], from a place between two blocks to another."""
    del shown  # fed-back states are for the other layers
    window = layer.window
    y = np.zeros_like(x)
    final = {name: np.zeros_like(leaf) for name, leaf in state.items()}
    for b in range(x.shape[0]):
        keys, values = list(state["keys"][b, window:]), list(state["values"][b, window:])
        recurrent = state["recurrent"][b]
        for t in range(x.shape[1]):
            if start[b, t]:
                keys, values = [np.zeros_like(keys[0])] * window, [np.zeros_like(values[0])] * window
                recurrent = params["initial_state"]
            u = rms(x[b, t], params["attention_norm"])
            keys.append(unit_heads_of(u, params["keys"], layer.heads))
            values.append(heads_of(u, params["values"], layer.heads))
            in_window = attend_window(layer, params, u, keys, values)
            in_states = attend_states(layer, params, u, *states_seen(layer, params, recurrent)[:2])
            y[b, t] = after_attention(params, x[b, t], np.concatenate([in_window, in_states]))
            if (t + 1) % window == 0:
                last = slice(-2 * window, None)
                recurrent = update(layer, params, recurrent, np.stack(keys[last]), np.stack(values[last]))
        final["keys"][b, window:] = np.stack(keys[-window:])
        final["values"][b, window:] = np.stack(values[-window:])
        final["recurrent"][b] = recurrent
    return y, final

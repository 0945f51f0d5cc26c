"""The block-recurrent layer as a loop over tokens in float64: what models/block_recurrent_transformer.py must equal."""

import numpy as np

from tests.reference.sliding_window import rms, t5_bucket, unit


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def heads_of(x, kernel, heads):
    return (x @ kernel).reshape(heads, -1)


def attend_all(queries, keys, values, scale):
    """Heads of one query [h k] over keys and values [j h k], no position and no mask."""
    return np.concatenate([softmax(keys[:, h] @ queries[h] * scale[h]) @ values[:, h] for h in range(len(queries))])


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


def update(layer, params, recurrent, keys, values):
    """One row's states [s d] after a block, given the keys and values of two blocks [2w h k]."""
    state_keys, state_values, queries, cross_queries = states_seen(layer, params, recurrent)
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
            z = np.tanh(middle @ params["state_mlp_output"])
            after[s] = apply_gate(params, "state_mlp_gate", old, z, middle)
            continue
        after[s] = apply_gate(params, "state_gate", old, hidden @ params["state_output"], hidden)
        if layer.configuration == "dual":
            middle = np.maximum(rms(after[s], params["state_mlp_norm"]) @ params["state_mlp_hidden"], 0.0)
            after[s] = apply_gate(params, "state_mlp_gate", after[s], middle @ params["state_mlp_output"], middle)
    return after


def block_recurrent_layer(layer, params, x, state, start):
    """y, state of BlockRecurrentLayer `layer` on x [b n d], from a place between two blocks to another."""
    window, heads = layer.window, layer.heads
    y = np.zeros_like(x)
    final = {name: np.array(leaf) for name, leaf in state.items()}
    for b in range(x.shape[0]):
        keys, values = list(state["keys"][b, window:]), list(state["values"][b, window:])
        recurrent = state["recurrent"][b]
        for t in range(x.shape[1]):
            if start[b, t]:
                keys, values = [np.zeros_like(keys[0])] * window, [np.zeros_like(values[0])] * window
                recurrent = params["initial_state"]
            u = rms(x[b, t], params["attention_norm"])
            query = [unit(part) for part in heads_of(u, params["queries"], heads)]
            scale = np.abs(params["attention_scale"])
            in_window = [
                softmax(
                    np.array(
                        [
                            (query[h] @ keys[-i][h] + params["relative_bias"][h, t5_bucket(i)]) * scale[h]
                            for i in range(window, 0, -1)
                        ]
                    )
                )
                @ np.stack([value[h] for value in values[-window:]])
                for h in range(heads)
            ]
            state_keys, state_values, _, _ = states_seen(layer, params, recurrent)
            cross_query = np.stack([unit(part) for part in heads_of(u, params["cross_queries"], heads)])
            in_states = attend_all(cross_query, state_keys, state_values, np.abs(params["cross_scale"]))
            y1 = x[b, t] + np.concatenate([*in_window, in_states]) @ params["attention_output"]
            forward = params["feed_forward"]
            y[b, t] = y1 + np.maximum(rms(y1, forward["norm"]) @ forward["hidden"], 0.0) @ forward["output"]
            keys.append(np.stack([unit(part) for part in heads_of(u, params["keys"], heads)]))
            values.append(heads_of(u, params["values"], heads))
            if (t + 1) % window == 0:
                recurrent = update(
                    layer, params, recurrent, np.stack(keys[-2 * window :]), np.stack(values[-2 * window :])
                )
                keys, values = keys[-window:], values[-window:]
        final["keys"][b], final["values"][b] = 0.0, 0.0
        final["keys"][b, window:], final["values"][b, window:] = np.stack(keys), np.stack(values)
        final["recurrent"][b] = recurrent
    final["state_keys"][:], final["state_values"][:], final["position"][:] = 0.0, 0.0, 0.0
    return y, final

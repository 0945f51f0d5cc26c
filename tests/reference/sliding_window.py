"""The sliding-window layer as a loop in float64: what models/sliding_window.py must equal."""

import numpy as np


def rms(x, scale):
    return x / np.sqrt(np.mean(x * x) + 1e-6) * scale


def unit(x):
    return x / np.sqrt(np.sum(x * x) + 1e-6)


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def t5_bucket(distance):
    if distance < 16:
        return distance
    return min(31, 16 + int(np.log(distance / 16) / np.log(8) * 16 + 1e-9))


def heads_of(x, kernel, heads):
    return (x @ kernel).reshape(heads, -1)


def unit_heads_of(x, kernel, heads):
    return np.stack([unit(part) for part in heads_of(x, kernel, heads)])


def attend_all(queries, keys, values, scale):
    """Heads of one query [h k] over keys and values [j h k], no position and no mask: [hk]."""
    if not len(keys):
        return np.zeros(queries.size)
    return np.concatenate([softmax(keys[:, h] @ queries[h] * scale[h]) @ values[:, h] for h in range(len(queries))])


def is_empty(key):
    return not np.any(key)


def attend_window(layer, params, u, keys, values):
    """Heads of one token [hk] over its window; `keys` and `values` [h k] are those of all tokens up to this one."""
    queries = unit_heads_of(u, params["queries"], layer.heads)
    scale = np.abs(params["attention_scale"])
    nearest = 0 if layer.sees_itself else 1
    seen = [
        (distance, keys[-1 - distance], values[-1 - distance])
        for distance in range(nearest, nearest + layer.window)
        if not (layer.mask_empty and is_empty(keys[-1 - distance]))
    ]
    if not seen:
        return np.zeros(queries.size)
    attended = []
    for h, query in enumerate(queries):
        bias = params["relative_bias"][h] if "relative_bias" in params else np.zeros(32)
        logits = np.array([(query @ key[h] + bias[t5_bucket(distance)]) * scale[h] for distance, key, _ in seen])
        attended.append(softmax(logits) @ np.stack([value[h] for _, _, value in seen]))
    return np.concatenate(attended)


def after_attention(params, x, attended):
    """Output projection, residual and feed-forward sublayer of one token."""
    y = x + attended @ params["attention_output"]
    forward = params["feed_forward"]
    return y + np.maximum(rms(y, forward["norm"]) @ forward["hidden"], 0.0) @ forward["output"]


def attend_states(layer, params, u, state_keys, state_values):
    """Heads of one token [hk] over the states."""
    cross_queries = unit_heads_of(u, params["cross_queries"], layer.heads)
    return attend_all(cross_queries, state_keys, state_values, np.abs(params["cross_scale"]))


def sliding_window_layer(layer, params, x, state, start, shown=None):
    """y, state of SlidingWindowLayer `layer` on x [b n d]; `shown` are keys and values [b s h k] of fed-back states."""
    y = np.zeros_like(x)
    final = {"keys": np.zeros_like(state["keys"]), "values": np.zeros_like(state["values"])}
    for b in range(x.shape[0]):
        keys, values = list(state["keys"][b]), list(state["values"][b])
        for t in range(x.shape[1]):
            if start[b, t]:
                keys, values = [np.zeros_like(keys[0])] * layer.window, [np.zeros_like(values[0])] * layer.window
            u = rms(x[b, t], params["attention_norm"])
            keys.append(unit_heads_of(u, params["keys"], layer.heads))
            values.append(heads_of(u, params["values"], layer.heads))
            attended = attend_window(layer, params, u, keys, values)
            if shown is not None:
                attended = np.concatenate([attended, attend_states(layer, params, u, shown[0][b], shown[1][b])])
            y[b, t] = after_attention(params, x[b, t], attended)
        final["keys"][b], final["values"][b] = np.stack(keys[-layer.window :]), np.stack(values[-layer.window :])
    return y, final

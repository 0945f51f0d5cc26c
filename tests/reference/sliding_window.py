"""The sliding-window layer and the stack as loops in float64: what models/sliding_window.py must equal."""

import numpy as np


def rms(x, scale):
    return x / np.sqrt(np.mean(x * x) + 1e-6) * scale


def unit(x):
    return x / np.sqrt(np.sum(x * x) + 1e-6)


def t5_bucket(distance):
    if distance < 16:
        return distance
    return min(31, 16 + int(np.log(distance / 16) / np.log(8) * 16 + 1e-9))


def sliding_window_layer(layer, params, x, state, start):
    """y, state of SlidingWindowLayer `layer` on x [b n d]."""
    heads, size, window = layer.heads, layer.head_dim, layer.window
    keys, values = state["keys"].copy(), state["values"].copy()  # [b w h k]: the last w tokens
    y = np.zeros_like(x)
    scale = np.abs(params["attention_scale"])
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            if start[b, t]:
                keys[b], values[b] = 0.0, 0.0
            u = rms(x[b, t], params["attention_norm"])
            attended = []
            for h in range(heads):
                query = unit((u @ params["queries"])[h * size : (h + 1) * size])
                logits = np.array(
                    [
                        (query @ keys[b, i, h] + params["relative_bias"][h, t5_bucket(window - i)]) * scale[h]
                        for i in range(window)
                    ]
                )
                weights = np.exp(logits - logits.max())
                weights /= weights.sum()
                attended.append(weights @ values[b, :, h])
            y1 = x[b, t] + np.concatenate(attended) @ params["attention_output"]
            forward = params["feed_forward"]
            hidden = np.maximum(rms(y1, forward["norm"]) @ forward["hidden"], 0.0)
            y[b, t] = y1 + hidden @ forward["output"]
            key = np.stack([unit(part) for part in (u @ params["keys"]).reshape(heads, size)])
            value = (u @ params["values"]).reshape(heads, size)
            keys[b] = np.concatenate([keys[b, 1:], key[None]])
            values[b] = np.concatenate([values[b, 1:], value[None]])
    return y, {"keys": keys, "values": values}

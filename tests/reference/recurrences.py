"""QRNN, SRU, SRU++, the LRN family and ATR as loops over rows and tokens in float64, from the papers' equations."""

import numpy as np

from tests.reference.sliding_window import softmax


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def norm(x, scale, offset, epsilon):
    return (x - x.mean()) / np.sqrt(np.mean((x - x.mean()) ** 2) + epsilon) * scale + offset


def over_tokens(step, x, state, start):
    """Runs step(row's memory, x_t) -> (memory, y_t) over all rows; a start gives a row a memory of zeros."""
    outputs, after = [], []
    for b in range(len(x)):
        memory = {name: leaf[b] for name, leaf in state.items()}
        row = []
        for t in range(x.shape[1]):
            if start[b, t]:
                memory = {name: np.zeros_like(leaf) for name, leaf in memory.items()}
            memory, y = step(memory, x[b, t])
            row.append(y)
        outputs.append(np.stack(row))
        after.append(memory)
    return np.stack(outputs), {name: np.stack([memory[name] for memory in after]) for name in state}


def lrn_layer(layer, params, x, state, start):
    gates = params["kernel"].shape[1]
    own = "identity" if layer.unit == "olrn" else "tanh"
    act = np.tanh if (layer.activation or own) == "tanh" else lambda a: a

    def step(memory, x):
        h = memory["carry"]
        u = x @ params["kernel"].reshape(len(x), -1)
        if layer.norm == "layer":
            u = norm(u, params["norm_scale"].ravel(), params["norm_offset"].ravel(), 1e-8)
        if layer.norm == "rms":
            u = u / np.sqrt(np.mean(u * u) + 1e-8) * params["norm_scale"].ravel()
        u = u.reshape(gates, -1) + (params["bias"] if layer.bias else 0.0)
        if layer.unit in ("lrn", "olrn"):
            k, q, v, *w = u
            h = act(sigmoid(k + h) * v + sigmoid(q - h) * h)
            h = sigmoid(w[0] - h) * h if w else h
        else:
            *q, v = u
            f = sigmoid((q[0] if q else 0.0) - h)
            h = act((1.0 - f) * v + f * h)
        return {"carry": h}, h

    return over_tokens(step, x, state, start)


def atr_layer(layer, params, x, state, start):
    act = np.tanh if layer.activation in (None, "tanh") else lambda a: a

    def step(memory, x):
        h = memory["carry"]
        p = x @ params["kernel"] + (params["bias"] if layer.bias else 0.0)
        q = h @ params["carry_kernel"] + (params["carry_bias"] if layer.bias else 0.0)
        h = act(sigmoid(p + q) * p + sigmoid(p - q) * h)
        return {"carry": h}, h

    return over_tokens(step, x, state, start)


def qrnn_layer(layer, params, x, state, start):
    def step(memory, x):
        seen = [x, *memory["tail"][::-1]]  # the token, then those before it
        u = np.concatenate(seen) @ params["kernel"].reshape(layer.window * layer.dim, -1)
        z, f, *others = u.reshape(-1, layer.width) + params["bias"]
        f = 1.0 - (1.0 - layer.zoneout) * (1.0 - sigmoid(f))
        o = sigmoid(others[0]) if others else 1.0
        i = sigmoid(others[1]) if len(others) == 2 else 1.0 - f
        c = f * memory["carry"] + i * np.tanh(z)
        tail = np.concatenate([memory["tail"], x[None]])[1:]
        y = np.concatenate([x, o * c]) if layer.dense else o * c
        return {"carry": c, "tail": tail}, y

    return over_tokens(step, x, state, start)


def sru_output(layer, params, x, u, c):
    """The carry after a token and its output, from the pre-activations [gates d]."""
    (v_f, v_r), (b_f, b_r) = params["carry_weights"], params["bias"]
    f, r = sigmoid(u[1] + b_f + v_f * c), sigmoid(u[2] + b_r + v_r * c)
    c = f * c + (1.0 - f) * u[0]
    g = np.tanh(c) if layer.tanh else c
    if layer.highway is None:
        h = r * g
    else:
        scale = np.sqrt(1.0 + 2.0 * np.exp(layer.highway_bias)) if layer.rescale else 1.0
        h = r * g + (1.0 - r) * (u[3] if len(u) == 4 else x * scale)
    if layer.norm == "post":
        h = norm(h, params["norm_scale"], params["norm_offset"], 1e-5)
    return c, h


def sru_layer(layer, params, x, state, start):
    def step(memory, x):
        u = norm(x, params["norm_scale"], params["norm_offset"], 1e-5) if layer.norm == "pre" else x
        u = u @ params["projection"] if layer.projection else u
        u = (u @ params["kernel"].reshape(len(u), -1)).reshape(-1, layer.width)
        if layer.biased:
            u[0] += params["candidate_bias"]
            u[3] += params["highway_offset"]
        c, h = sru_output(layer, params, x, u, memory["carry"])
        return {"carry": c}, h

    return over_tokens(step, x, state, start)


def srupp_layer(layer, params, x, state, start):
    def down(x):
        x = norm(x, params["norm_scale"], params["norm_offset"], 1e-5) if layer.norm == "pre" else x
        return x @ params["projection_kernel"]

    def step(memory, x):
        q, after = down(x), {}
        mixed = q
        if layer.attention:
            key, value = (q @ params["keys_values"].reshape(len(q), -1)).reshape(2, layer.heads, -1)
            after = {
                name: np.concatenate([memory[name], new[None]])[1:]
                for name, new in (("memory", x), ("keys", key), ("values", value))
            }
            held = [j for j in range(layer.context) if np.any(after["keys"][j])]
            for_heads = q.reshape(layer.heads, -1)
            size = for_heads.shape[1]
            attended = [
                softmax(after["keys"][held, h] @ for_heads[h] / np.sqrt(size)) @ after["values"][held, h]
                for h in range(layer.heads)
            ]
            mixed = q + params["alpha"] * np.concatenate(attended)
        if layer.attention_norm:
            mixed = norm(mixed, params["attention_norm_scale"], params["attention_norm_offset"], 1e-5)
        u = (mixed @ params["kernel"].reshape(len(mixed), -1)).reshape(-1, layer.width)
        c, h = sru_output(layer, params, x, u, memory["carry"])
        return {"carry": c, **after}, h

    return over_tokens(step, x, state, start)

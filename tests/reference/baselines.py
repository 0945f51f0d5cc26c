"""LSTM, GRU, RNN, TCN, the Transformer and the R-Transformer as loops over rows and tokens in float64."""

import numpy as np

from tests.reference.recurrences import over_tokens, sigmoid
from tests.reference.sliding_window import softmax


def cell_step(name, u, carry, params, prefix="", reset_first=False):
    """The carry [h, ...] after a token, from its projected input u [gates d]."""
    inner, h = params[f"{prefix}carry_kernel"], carry[0]
    if name == "rnn":
        return [np.tanh(u[0] + h @ inner[:, 0])]
    if name == "lstm":
        i, f, g, o = (u[gate] + h @ inner[:, gate] for gate in range(4))
        c = sigmoid(f) * carry[1] + sigmoid(i) * np.tanh(g)
        return [sigmoid(o) * np.tanh(c), c]
    r, z = (sigmoid(u[gate] + h @ inner[:, gate]) for gate in range(2))
    if reset_first:
        new = np.tanh(u[2] + (r * h) @ inner[:, 2])
    else:
        new = np.tanh(u[2] + r * (h @ inner[:, 2] + params[f"{prefix}carry_bias"]))
    return [(1.0 - z) * new + z * h]


def projected(x, params, prefix=""):
    kernel = params[f"{prefix}kernel"]
    return (x @ kernel.reshape(len(x), -1)).reshape(kernel.shape[1:]) + params[f"{prefix}bias"]


def rnn_layer(layer, params, x, state, start):
    def step(memory, x):
        after = cell_step(layer.cell, projected(x, params), list(memory.values()), params, "", layer.reset_first)
        return dict(zip(memory, after, strict=True)), after[0]

    return over_tokens(step, x, state, start)


def tcn_layer(layer, params, x, state, start):
    def convolved(name, x, tail):
        seen = np.concatenate([tail, x[None]])  # the last is the token itself
        v = params[f"{name}_kernel"]
        w = params[f"{name}_gain"] * v / np.sqrt(np.sum(v * v, axis=(0, 1)))
        y = params[f"{name}_bias"].copy()
        for tap in range(layer.kernel_size):
            y += seen[-1 - tap * layer.dilation] @ w[:, tap]
        return np.maximum(y, 0.0), seen[1:]

    def step(memory, x):
        hidden, inputs = convolved("first", x, memory["inputs"])
        y, tail = convolved("second", hidden, memory["hidden"])
        passed = x @ params["downsample"] + params["downsample_bias"] if "downsample" in params else x
        return {"inputs": inputs, "hidden": tail}, np.maximum(y + passed, 0.0)

    return over_tokens(step, x, state, start)


def positions(layer, params, x, state, start):
    def step(memory, x):
        at, d = memory["position"], len(x)
        at = at if layer.period is None else at % layer.period
        signal = [(np.sin, np.cos)[i % 2](at / 10000.0 ** ((i - i % 2) / d)) for i in range(d)]
        return {"position": at + 1}, x + np.array(signal)

    return over_tokens(step, x, state, start)


def norm(x, params, name):
    deviation = np.std(x, ddof=1)
    return params[f"{name}_norm"] * (x - x.mean()) / (deviation + 1e-6) + params[f"{name}_norm_offset"]


def linear(x, params, name):
    return x @ params[name] + params[f"{name}_bias"]


def attention_and_feed_forward(layer, params, memory, x):
    u, after = norm(x, params, "attention"), {}
    q, k, v = (linear(u, params, name).reshape(layer.heads, -1) for name in ("queries", "keys", "values"))
    for name, new in (("keys", k), ("values", v)):
        after[name] = np.concatenate([memory[name], new[None]])[1:]
    held = [j for j in range(layer.context) if np.any(after["keys"][j])]
    attended = [
        softmax(after["keys"][held, h] @ q[h] / np.sqrt(q.shape[1])) @ after["values"][held, h]
        for h in range(layer.heads)
    ]
    x = x + linear(np.concatenate(attended), params, "attention_output")
    hidden = np.maximum(linear(norm(x, params, "feed_forward"), params, "hidden"), 0.0)
    return x + linear(hidden, params, "output"), after


def transformer_layer(layer, params, x, state, start):
    def step(memory, x):
        y, after = attention_and_feed_forward(layer, params, memory, x)
        return after, y

    return over_tokens(step, x, state, start)


def elementwise_cell(name, u, c, params, prefix):
    """Carry and output of a recurrence without a matrix, after a token."""
    if name == "qrnn":
        z, f, o = np.tanh(u[0]), sigmoid(u[1]), sigmoid(u[2])
        c = f * c + (1.0 - f) * z
        return c, o * c
    if name == "sru":
        v_f, v_r = params[f"{prefix}carry_weights"]
        f, r = sigmoid(u[1] + v_f * c), sigmoid(u[2] + v_r * c)
        c = f * c + (1.0 - f) * u[0]
        return c, r * c
    if name in ("lrn", "olrn"):
        h = sigmoid(u[0] + c) * u[2] + sigmoid(u[1] - c) * c
        h = np.tanh(h) if name == "lrn" else sigmoid(u[3] - h) * h
        return h, h
    *q, v = u
    assert len(q) == {"glrn": 1, "elrn": 0}[name]
    f = sigmoid((q[0] if q else 0.0) - c)
    h = np.tanh((1.0 - f) * v + f * c)
    return h, h


def r_transformer_layer(layer, params, x, state, start):
    matrices = layer.cell in ("gru", "lstm", "rnn")

    def last_state(prefix, seen):
        carry, h = [np.zeros(layer.dim)] * 2, np.zeros(layer.dim)
        for x in seen:
            u = projected(x, params, prefix)
            if matrices:
                carry = cell_step(layer.cell, u, carry, params, prefix)
                h = carry[0]
            else:
                carry[0], h = elementwise_cell(layer.cell, u, carry[0], params, prefix)
        return h

    def step(memory, x):
        tails = []
        for i in range(layer.local_layers):
            seen = np.concatenate([memory["tails"][i], norm(x, params, f"local_{i}")[None]])
            x = x + last_state(f"local_{i}_", seen)
            tails.append(seen[1:])
        y, after = attention_and_feed_forward(layer, params, memory, x)
        return {"tails": np.stack(tails), **after}, y

    return over_tokens(step, x, state, start)

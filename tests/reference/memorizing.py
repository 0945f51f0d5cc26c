"""The Memorizing Transformer's layer as a loop in float64: what models/memorizing_transformer.py must equal."""

import numpy as np

from tests.reference.constants import stop_gradient
from tests.reference.sliding_window import after_attention, attend_window, heads_of, rms, softmax, unit_heads_of


def attend_memory(layer, params, u, memory):
    """Heads of one token [h k] over the best of the memory, a list of keys and values, each [h k]."""
    queries = unit_heads_of(u, params["queries"], layer.heads)
    scale = np.abs(params["attention_scale"])
    attended = []
    for h, query in enumerate(queries):
        best = sorted(memory, key=lambda entry, h=h, query=query: -(query @ entry[0][h]))[: layer.top_k]
        weights = softmax(np.array([query @ key[h] * scale[h] for key, _ in best]))
        attended.append(weights @ np.stack([value[h] for _, value in best]))
    return np.stack(attended)


def memorizing_layer(layer, params, x, state, start):
    """y, state of MemorizingLayer `layer` on x [b n d]."""
    y = np.zeros_like(x)
    final = {name: np.zeros_like(array) for name, array in state.items()}
    gate = 1.0 / (1.0 + np.exp(-params["memory_gate"]))[:, None]
    for b in range(x.shape[0]):
        keys, values, document, count = *(list(state[name][b]) for name in ("keys", "values")), *told(layer, state, b)
        for t in range(x.shape[1]):
            if start[b, t]:
                keys, values = [np.zeros_like(keys[0])] * layer.window, [np.zeros_like(values[0])] * layer.window
                document, count = [], 0
            u = rms(x[b, t], params["attention_norm"])
            keys.append(unit_heads_of(u, params["keys"], layer.heads))
            values.append(heads_of(u, params["values"], layer.heads))
            document.append(stop_gradient((keys[-1], values[-1])))
            count += 1
            attended = attend_window(layer, params, u, keys, values).reshape(layer.heads, -1)
            in_window = layer.window if layer.sees_itself else layer.window + 1
            memory = document[:-in_window][-layer.memory :]
            if memory:
                attended = gate * attend_memory(layer, params, u, memory) + (1.0 - gate) * attended
            y[b, t] = after_attention(params, x[b, t], attended.ravel())
        final["keys"][b], final["values"][b] = np.stack(keys[-layer.window :]), np.stack(values[-layer.window :])
        for number in range(max(0, count - layer.window - layer.memory), count - layer.window):
            key, value = document[number - count]
            place = number % layer.memory
            final["memory_keys"][b, :, place], final["memory_values"][b, :, place] = key, value
        full = layer.memory + layer.window
        final["position"][b] = count if count < full else full + (count - layer.window) % layer.memory
    return y, final


def told(layer, state, b):
    """What a row's state knows of its document: keys and values, oldest first, and how many tokens there were."""
    count = int(state["position"][b])
    remembered = [
        (state["memory_keys"][b][:, number % layer.memory], state["memory_values"][b][:, number % layer.memory])
        for number in range(max(0, count - layer.window - layer.memory), count - layer.window)
    ]
    in_window = min(count, layer.window)
    cached = zip(
        state["keys"][b][layer.window - in_window :], state["values"][b][layer.window - in_window :], strict=True
    )
    return [*remembered, *cached], count

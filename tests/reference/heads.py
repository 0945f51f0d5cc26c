"""The heads of models in NumPy, one token at a time, from the equations."""

import numpy as np

from block_recurrent.layers.adaptive import Adaptive
from block_recurrent.layers.heads import MixtureOfSoftmaxes, Tied, Untied
from block_recurrent.layers.signal_heads import Classifier, Notes


def embed(model, params, token):
    """The vector of a token [d]; of music, of a frame's bytes."""
    if isinstance(model.head, Notes):
        return linear(params, keys_down(token, model.head.keys))
    if isinstance(model.head, Classifier) and model.head.pixels:
        return linear(params, np.array([(token / 255.0 - 0.1307) / 0.3081]))
    if isinstance(model.head, Adaptive):
        cluster = sum(token >= cutoff for cutoff in model.head.cutoffs)
        row = token - (0, *model.head.cutoffs)[cluster]
        return params[f"embedding_{cluster}"][row] @ params[f"embedding_projection_{cluster}"]
    vector = params["embedding"][token]
    return vector @ params["embedding_projection"] if "embedding_projection" in params else vector


def keys_down(frame, keys):
    """1.0 for every key that is down: the first key is the highest bit of the first byte."""
    return np.array([float(frame[key // 8] >> (7 - key % 8) & 1) for key in range(keys)])


def linear(params, numbers):
    return numbers @ params["embedding"] + params["embedding_bias"] if "embedding" in params else numbers


def logits(model, params, x):
    """Scores of all tokens [v] from the features of one [d]."""
    return HEADS[type(model.head)](model.head, params, params.get("head", {}), x)


def tied(head, params, own, x):
    x = x @ own["projection"] if "projection" in own else x
    scale = np.sqrt(params["embedding"].shape[1]) if head.scaled else 1.0
    return params["embedding"] @ x / scale + own.get("bias", 0.0)


def untied(head, params, own, x):
    return x @ own["kernel"] + own["bias"]


def output(head, params, own, x):
    return x @ own["kernel"] + own["kernel_bias"]


def mixture_of_softmaxes(head, params, own, x):
    """log sum_k prior_k softmax(W tanh(W_k x + b_k) + b)."""
    latents = np.tanh(x @ own["latents"] + own["latents_bias"]).reshape(head.experts, -1)
    prior = softmax(x @ own["prior"])
    return np.log(sum(p * softmax(params["embedding"] @ h + own["bias"]) for p, h in zip(prior, latents, strict=True)))


def adaptive(head, params, own, x):
    """log p(token) = log p(cluster) + log p(token | cluster), the first cluster's tokens standing beside the others."""

    def latent(i):
        return x @ (params[f"embedding_projection_{i}"].T if head.tie_projections else own[f"projection_{i}"])

    def within(i):
        return params[f"embedding_{i}"] @ latent(i) + own[f"bias_{i}"]

    first = softmax(np.concatenate([within(0), latent(0) @ own["clusters"] + own["clusters_bias"]]))
    shortlist, clusters = first[: head.cutoffs[0]], first[head.cutoffs[0] :]
    tails = [p * softmax(within(i)) for i, p in enumerate(clusters, start=1)]
    return np.log(np.concatenate([shortlist, *tails]))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


HEADS = {
    Tied: tied,
    Untied: untied,
    MixtureOfSoftmaxes: mixture_of_softmaxes,
    Adaptive: adaptive,
    Notes: output,
    Classifier: output,
}

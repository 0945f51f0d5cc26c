"""The authors' parameters under our names."""

import numpy as np

TOKENS = {
    "attention_norm": "tbase/_kvq/pre_attn_layernorm/scale",
    "keys": "tbase/_kvq/keys_layer/kernel",
    "values": "tbase/_kvq/values_layer/kernel",
    "queries": "tbase/_kvq/queries_layer/kernel",
    "cross_queries": "tbase/_kvq/queries2_layer/kernel",
    "attention_scale": "tbase/_kvq/attention_scale",
    "cross_scale": "tbase/attention_scale2",
    "relative_bias": "relative_positions/rel_embedding",
    "attention_output": "tbase/post_attn_mlp/output_layer/kernel",
    "feed_forward/norm": "tbase/pre_ffn_layernorm/scale",
    "feed_forward/hidden": "tbase/ffn/hidden0/kernel",
    "feed_forward/output": "tbase/ffn/output_layer/kernel",
}
STATES = {
    "initial_state": "recurrent_initial_state",
    "state_ids": "recurrent_tbase/_kvq/position_embeddings",
    "state_norm": "recurrent_tbase/_kvq/pre_attn_layernorm/scale",
    "state_keys": "recurrent_tbase/_kvq/keys_layer/kernel",
    "state_values": "recurrent_tbase/_kvq/values_layer/kernel",
    "state_queries": "recurrent_tbase/_kvq/queries_layer/kernel",
    "state_cross_queries": "recurrent_tbase/_kvq/queries2_layer/kernel",
    "state_scale": "recurrent_tbase/_kvq/attention_scale",
    "state_cross_scale": "recurrent_tbase/attention_scale2",
    "state_output": "recurrent_tbase/post_attn_mlp/output_layer/kernel",
    "state_mlp_norm": "recurrent_tbase/pre_ffn_layernorm/scale",
    "state_mlp_hidden": "recurrent_tbase/ffn/hidden0/kernel",
    "state_mlp_output": "recurrent_tbase/ffn/output_layer/kernel",
}
for ours, theirs in (("state_gate", "post_attn_mlp"), ("state_mlp_gate", "ffn")):
    STATES[f"{ours}_bias"] = f"recurrent_tbase/{theirs}/gate_bias"
    for part in ("input", "forget"):
        for kind in ("kernel", "bias"):
            STATES[f"{ours}_{part}_{kind}"] = f"recurrent_tbase/{theirs}/{part}_gate/{kind}"


def layer_params(arrays: dict[str, np.ndarray], prefix: str) -> dict:
    """The parameters, or gradients, of the layer under `prefix`; none of the authors' may be left over."""
    there = {name.removeprefix(f"{prefix}/"): value for name, value in arrays.items() if name.startswith(f"{prefix}/")}
    params: dict = {}
    for ours, theirs in {**TOKENS, **STATES}.items():
        if theirs in there:
            *folder, name = ours.split("/")
            (params.setdefault(folder[0], {}) if folder else params)[name] = there.pop(theirs)
    assert not there, f"parameters of {prefix} without a place here: {sorted(there)}"
    return params

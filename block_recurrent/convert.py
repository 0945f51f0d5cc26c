"""Turns weights of the official PyTorch packages into parameters of the layers here.

python -m block_recurrent.convert --package=sru --weights=model.pt --output=converted/sru
python -m block_recurrent.convert --package=torchqrnn --weights=model.npz --prefix=rnn. --output=converted/qrnn

Packages: sru (SRU and SRU++ of 3.0, SRU of 2.6), torchqrnn, lrn (cells lrn, atr, sru, gru and lstm of the authors'
repository), torch (torch.nn.LSTM, GRU and RNN), tcn and r_transformer (the blocks of their authors' repositories).
Weights are a state dict saved by torch.save (needs torch, which runs no code from the file) or an .npz of its arrays.
The output is an Orbax checkpoint of a tree {"layers_0": {...}, ...}: the parameters of
stack(layers, scan_depth=False), with one printed line for each layer.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

from block_recurrent.commandline import command_parser
from block_recurrent.errors import UserError, fail, missing_package, run_command

try:
    import numpy as np
except ImportError as error:
    if __name__ != "__main__" or missing_package(error) is None:
        raise
    fail(missing_package(error))

Arrays = dict[str, np.ndarray]


class Weights:
    """One layer's arrays of a state dict, taken out by name; none may be left over."""

    def __init__(self, layer: str, arrays: Arrays):
        self.layer, self.left = layer, dict(arrays)

    def __contains__(self, name: str) -> bool:
        return name in self.left

    def take(self, name: str, *shape: int | None) -> np.ndarray:
        """An array of the given shape, None standing for any size."""
        if name not in self.left:
            raise UserError(f"{self.layer}{name} is not among the weights; there are {', '.join(sorted(self.left))}")
        array = self.left.pop(name)
        if len(array.shape) != len(shape) or any(
            want not in (None, size) for size, want in zip(array.shape, shape, strict=True)
        ):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise UserError(f"{self.layer}{name} has shape {array.shape}, where ({wanted}) is needed")
        return array

    def gates(self, name: str, width: int, torch_linear: bool = True, interleaved: bool = False) -> np.ndarray:
        """A joint matrix of several gates of `width` channels, as [in gates channels]."""
        matrix = self.take(name, None, None)
        matrix = matrix.T if torch_linear else matrix  # torch keeps a Linear's weight as (out, in)
        if matrix.shape[1] % width:
            raise UserError(f"{self.layer}{name}: {matrix.shape[1]} outputs are no multiple of {width} channels")
        if interleaved:
            return matrix.reshape(len(matrix), width, -1).swapaxes(1, 2)
        return matrix.reshape(len(matrix), -1, width)

    def done(self) -> None:
        if self.left:
            raise UserError(f"{self.layer}: no place here for {', '.join(sorted(self.left))}")


def sru_params(weights: Weights) -> Arrays:
    """A layer of SRU or SRU++, sru 3.0 or 2.6: of each channel's sub-matrices the index runs fastest."""
    vectors = weights.take("weight_c", None)
    width = len(vectors) // 2
    params = {"carry_weights": vectors.reshape(2, width), "bias": weights.take("bias", 2 * width).reshape(2, width)}
    weights.left.pop("scale_x", None)  # a constant
    if "layer_norm.weight" in weights:
        params["norm_scale"] = weights.take("layer_norm.weight", None)
        params["norm_offset"] = weights.take("layer_norm.bias", len(params["norm_scale"]))
    if "weight" in weights:  # 2.6
        params["kernel"] = weights.gates("weight", width, torch_linear=False, interleaved=True)
        if "weight_proj" in weights:
            params["projection"] = weights.take("weight_proj", None, len(params["kernel"]))
    elif "transform_module.linear1.weight" in weights:
        params |= srupp_params(weights, width)
    elif "transform_module.0.weight" in weights:
        params["kernel"] = weights.gates("transform_module.1.weight", width, interleaved=True)
        params["projection"] = weights.take("transform_module.0.weight", len(params["kernel"]), None).T
    else:
        params["kernel"] = weights.gates("transform_module.weight", width, interleaved=True)
    return params


def srupp_params(weights: Weights, width: int) -> Arrays:
    """What SRU++ has in place of the input projection."""
    at = "transform_module."
    params = {"projection_kernel": weights.take(f"{at}linear1.weight", None, None).T}
    size = params["projection_kernel"].shape[1]
    last = "linear2"
    if f"{at}alpha" in weights:
        params["alpha"] = weights.take(f"{at}alpha", 1)[0]
        params["keys_values"] = weights.gates(f"{at}linear2.weight", size)
        last = "linear3"
    params["kernel"] = weights.gates(f"{at}{last}.weight", width, interleaved=True)
    if f"{at}layer_norm.weight" in weights:
        params["attention_norm_scale"] = weights.take(f"{at}layer_norm.weight", size)
        params["attention_norm_offset"] = weights.take(f"{at}layer_norm.bias", size)
    return params


def channels_of(weights: Weights, name: str, bias: np.ndarray, gates: int) -> int:
    """How many channels a joint bias has for each gate."""
    if len(bias) % gates:
        raise UserError(f"{weights.layer}{name}: {len(bias)} outputs are no multiple of {gates} gates")
    return len(bias) // gates


def qrnn_params(weights: Weights, output_gate: bool = True) -> Arrays:
    """A layer of torchqrnn, whose F is one minus the paper's forget gate."""
    gates = 3 if output_gate else 2
    bias = weights.take("linear.bias", None)
    width = channels_of(weights, "linear.bias", bias, gates)
    sign = np.array([1.0, -1.0, 1.0][:gates], np.float32)[:, None]
    return {"kernel": weights.gates("linear.weight", width) * sign, "bias": bias.reshape(gates, width) * sign}


def lrn_params(weights: Weights, gates: int = 3) -> Arrays:
    """A cell of the LRN authors' language model; or one of lrn's form with another number of gates."""
    if "_b" in weights:  # lstm, its gates in the order i, f, o, g
        width = channels_of(weights, "_b", weights.left["_b"], 4)
        order = [0, 1, 3, 2]
        both = weights.gates("_W", width, torch_linear=False)[:, order]  # of the input and of the state
        bias = weights.take("_b", 4 * width).reshape(4, width)[order]
        return {"kernel": both[:-width], "carry_kernel": both[-width:], "bias": bias}
    bias = weights.take("_W_b", None)
    if "_U" in weights and len(bias) == 2 * len(weights.left["_U_b"]):  # gru
        width = len(bias) // 2
        both = [weights.gates(name, width, torch_linear=False) for name in ("_W", "_U")]
        both = np.concatenate(both, axis=1)  # [input+state gates channels]
        bias = np.concatenate([bias.reshape(2, width), weights.take("_U_b", width)[None]])
        return {"kernel": both[:-width], "carry_kernel": both[-width:], "bias": bias}
    if "_U" in weights:
        width = len(bias)
        return {
            "kernel": weights.take("_W", None, width),
            "bias": bias,
            "carry_kernel": weights.take("_U", width, width),
            "carry_bias": weights.take("_U_b", width),
        }
    if "_Vf" in weights:
        width = channels_of(weights, "_W_b", bias, 4)
        forget, candidate, reset, highway = bias.reshape(4, width)
        order = [1, 0, 2, 3]  # candidate, forget, reset, highway from forget, candidate, reset, highway
        return {
            "kernel": weights.gates("_W", width, torch_linear=False)[:, order],
            "carry_weights": np.stack([weights.take("_Vf", width), weights.take("_Vr", width)]),
            "bias": np.stack([forget, reset]),
            "candidate_bias": candidate,
            "highway_offset": highway,
        }
    width = channels_of(weights, "_W_b", bias, gates)
    return {"kernel": weights.gates("_W", width, torch_linear=False), "bias": bias.reshape(gates, width)}


def torch_params(weights: Weights, prefix: str = "", suffix: str = "") -> Arrays:
    """A layer of torch.nn.LSTM, GRU or RNN, both directions where there are two; of two biases that add up, the sum."""
    width = weights.left[f"weight_hh{suffix}"].shape[-1]
    into, inner = (weights.gates(f"weight_{kind}{suffix}", width) for kind in ("ih", "hh"))
    gates = into.shape[1]
    bias, own = (weights.take(f"bias_{kind}{suffix}", gates * width).reshape(gates, width) for kind in ("ih", "hh"))
    params = {"kernel": into, "carry_kernel": inner, "bias": bias + own}
    if gates == 3:  # GRU: the candidate's part of the state has a bias of its own
        params |= {"bias": np.concatenate([bias[:2] + own[:2], bias[2:]]), "carry_bias": own[2]}
    params = {f"{prefix}{name}": array for name, array in params.items()}
    backwards = "_reverse"
    return params | (torch_params(weights, "reverse_", backwards) if f"weight_ih{backwards}" in weights else {})


def tcn_params(weights: Weights) -> Arrays:
    """A TemporalBlock, whose convolutions have the token itself last."""
    weights.left = {
        name: array for name, array in weights.left.items() if not name.startswith("net.")
    }  # the same again
    params = {}
    for name, conv in (("first", "conv1"), ("second", "conv2")):
        direction = weights.take(f"{conv}.weight_v", None, None, None)
        params |= {
            f"{name}_kernel": direction.transpose(1, 2, 0)[:, ::-1],
            f"{name}_gain": weights.take(f"{conv}.weight_g", len(direction), 1, 1)[:, 0, 0],
            f"{name}_bias": weights.take(f"{conv}.bias", len(direction)),
        }
    if "downsample.weight" in weights:
        params["downsample"] = weights.take("downsample.weight", None, None, 1)[:, :, 0].T
        params["downsample_bias"] = weights.take("downsample.bias", params["downsample"].shape[1])
    return params


def r_transformer_params(weights: Weights) -> Arrays:
    """A Block of the R-Transformer; its LocalRNN's output layer, which is never used, is left out."""
    params: Arrays = {}

    def linear(name: str, theirs: str) -> None:
        params[name] = weights.take(f"{theirs}.weight", None, None).T
        params[f"{name}_bias"] = weights.take(f"{theirs}.bias", params[name].shape[1])

    def norm(name: str, theirs: str) -> None:
        params[f"{name}_norm"] = weights.take(f"{theirs}.norm.a_2", None)
        params[f"{name}_norm_offset"] = weights.take(f"{theirs}.norm.b_2", None)

    for i in range(len([name for name in weights.left if name.endswith("connection.norm.a_2")])):
        for unused in ("weight", "bias"):
            weights.left.pop(f"layers.{i}.local_rnn.output.0.{unused}", None)
        at = f"layers.{i}.local_rnn.rnn."
        own = {name.removeprefix(at).removesuffix("_l0"): a for name, a in weights.left.items() if name.startswith(at)}
        weights.left = {name: array for name, array in weights.left.items() if not name.startswith(at)}
        params |= torch_params(Weights(weights.layer + at, own), f"local_{i}_")
        norm(f"local_{i}", f"layers.{i}.connection")
    norm("attention", "connections.0")
    norm("feed_forward", "connections.1")
    for i, name in enumerate(("queries", "keys", "values", "attention_output")):
        linear(name, f"pooling.linears.{i}")
    linear("hidden", "feed_forward.w_1")
    linear("output", "feed_forward.w_2")
    return params


# Package: what its layers are called in a state dict, and how one becomes parameters.
PACKAGES: dict[str, tuple[str, Callable[..., Arrays]]] = {
    "torch": ("lN.", torch_params),
    "tcn": ("network.N.", tcn_params),
    "r_transformer": ("forward_net.N.", r_transformer_params),
    "sru": ("rnn_lst.N.", sru_params),
    "torchqrnn": ("layers.N.", qrnn_params),
    "lrn": ("cell_N.", lrn_params),
}


def convert(package: str, arrays: Arrays, prefix: str = "", **settings) -> dict[str, Arrays]:
    """The parameters of a package's layers, {"layers_0": {...}, ...}; arrays outside `prefix` are left alone."""
    if package not in PACKAGES:
        raise UserError(f"package {package!r} is not one of {', '.join(PACKAGES)}")
    named, params_of = PACKAGES[package]
    if package == "torch":  # weight_ih_l0_reverse: the layer comes after the name
        arrays = {re.sub(r"(\w+?)_l(\d+)(_reverse)?$", r"l\2.\1\3", name): array for name, array in arrays.items()}
    pattern = re.escape(prefix) + re.escape(named).replace("N", r"(\d+)")
    layers: dict[int, Arrays] = {}
    names = {}
    for name, array in arrays.items():
        match = re.match(pattern, name)
        if match:
            layers.setdefault(int(match[1]), {})[name[match.end() :]] = np.asarray(array)
            names[int(match[1])] = match[0]
        elif name.startswith(prefix) and prefix:
            raise UserError(f"{name} is not of {package}: its weights are called {prefix}{named}...")
    if sorted(layers) != list(range(len(layers))) or not layers:
        found = ", ".join(sorted(arrays)[:6])
        raise UserError(f"no weights of {package} called {prefix}{named}... from N = 0 on; there are {found}")
    converted = {}
    for index in sorted(layers):
        weights = Weights(names[index], layers[index])
        converted[f"layers_{index}"] = params_of(weights, **settings)
        weights.done()
    return converted


def read_weights(file: Path) -> Arrays:
    """The arrays of an .npz, or of a state dict that torch saved."""
    if not file.exists():
        raise UserError(f"{file} does not exist")
    try:
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        try:
            import torch
        except ImportError as error:
            raise UserError(f"{file}: reading a state dict needs torch; install it, or give an .npz") from error
        state = torch.load(file, map_location="cpu", weights_only=True)
        return {name: value.numpy() for name, value in state.items() if hasattr(value, "numpy")}
    except UserError:
        raise
    except Exception as error:  # both libraries raise many kinds for a file that is not theirs
        raise UserError(f"{file} is no readable .npz or state dict ({str(error).splitlines()[0][:120]})") from error


def main(arguments: list[str]) -> None:
    parser = command_parser("convert", __doc__)
    parser.add_argument("--package", choices=PACKAGES, required=True)
    parser.add_argument(
        "--weights", type=Path, required=True, help="a file of torch.save, or an .npz of the same names"
    )
    parser.add_argument("--prefix", default="", help="what the names begin with in a larger model, such as rnn.")
    parser.add_argument("--no_output_gate", action="store_true", help="torchqrnn with output_gate=False: f-pooling")
    parser.add_argument("--output", type=Path, required=True, help="a folder that does not exist yet")
    options = parser.parse_args(arguments)
    settings = {"output_gate": False} if options.no_output_gate else {}
    if settings and options.package != "torchqrnn":
        raise UserError(f"--no_output_gate is for torchqrnn, not for {options.package}")
    if os.path.lexists(options.output):
        raise UserError(f"{options.output} exists: choose another --output")
    params = convert(options.package, read_weights(options.weights), options.prefix, **settings)

    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(options.output.absolute(), params)
    for layer, arrays in params.items():
        print(layer + ": " + ", ".join(f"{name} {list(array.shape)}" for name, array in sorted(arrays.items())))
    print(f"{len(params)} layers are in {options.output}")


if __name__ == "__main__":
    run_command(main)

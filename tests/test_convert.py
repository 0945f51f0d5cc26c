"""Weights of the official packages: from a file to a checkpoint, and what is told where they do not fit."""

import numpy as np
import orbax.checkpoint as ocp
import pytest

from block_recurrent import convert
from block_recurrent.errors import UserError

WIDTH, DIM = 4, 6


def sru_arrays(prefix=""):
    rng = np.random.default_rng(0)
    shapes = {"weight_c": (2 * WIDTH,), "bias": (2 * WIDTH,), "transform_module.weight": (4 * WIDTH, DIM)}
    arrays = {f"{prefix}rnn_lst.0.{name}": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return {**arrays, f"{prefix}rnn_lst.0.scale_x": np.ones(1, np.float32)}


def test_the_command_writes_a_checkpoint(tmp_path, capsys):
    arrays = {**sru_arrays("model.rnn."), "model.embedding": np.zeros((3, DIM), np.float32)}
    np.savez(tmp_path / "weights.npz", **arrays)
    output = tmp_path / "converted"
    arguments = ["--package=sru", f"--weights={tmp_path / 'weights.npz'}", "--prefix=model.rnn.", f"--output={output}"]
    convert.main(arguments)
    assert f"layers_0: bias [2, 4], carry_weights [2, 4], kernel [{DIM}, 4, {WIDTH}]" in capsys.readouterr().out
    with ocp.StandardCheckpointer() as checkpointer:
        params = checkpointer.restore(output)
    matrix = arrays["model.rnn.rnn_lst.0.transform_module.weight"]
    np.testing.assert_array_equal(params["layers_0"]["kernel"][:, 1, 2], matrix[2 * 4 + 1])  # channel 2, forget gate
    with pytest.raises(UserError, match="converted exists"):
        convert.main(arguments)


def test_a_state_dict_of_torch_is_read(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.save({name: torch.from_numpy(array) for name, array in sru_arrays().items()}, tmp_path / "weights.pt")
    assert convert.convert("sru", convert.read_weights(tmp_path / "weights.pt"))["layers_0"]["kernel"].shape == (
        6,
        4,
        4,
    )


def renamed(old, new):
    return {name.replace(old, new): array for name, array in sru_arrays().items()}


@pytest.mark.parametrize(
    ("package", "arrays", "told"),
    [
        ("sru", renamed("bias", "offset"), "rnn_lst.0.bias is not among the weights"),
        ("sru", {**sru_arrays(), "rnn_lst.0.extra": np.zeros(2)}, "rnn_lst.0.: no place here for extra"),
        ("sru", {**sru_arrays(), "rnn_lst.0.bias": np.zeros(3)}, r"bias has shape \(3,\), where \(8\) is needed"),
        (
            "sru",
            {**sru_arrays(), "rnn_lst.0.transform_module.weight": np.zeros((13, 6))},
            "13 outputs are no multiple of 4 channels",
        ),
        ("torchqrnn", sru_arrays(), r"no weights of torchqrnn called layers\.N\."),
        ("sru", renamed("rnn_lst.0", "rnn_lst.1"), "from N = 0 on"),
        ("torchqrnn", {"layers.0.linear.bias": np.zeros(10)}, "10 outputs are no multiple of 3 gates"),
        ("gru", {}, "package 'gru' is not one of torch, tcn, r_transformer, sru, torchqrnn, lrn"),
    ],
)
def test_weights_that_do_not_fit_are_told(package, arrays, told):
    with pytest.raises(UserError, match=told):
        convert.convert(package, arrays)


def test_a_file_that_is_no_archive_is_told(tmp_path):
    (tmp_path / "weights.npz").write_bytes(b"not an archive")
    with pytest.raises(UserError, match=r"weights\.npz is no readable \.npz or state dict"):
        convert.read_weights(tmp_path / "weights.npz")
    np.savez(tmp_path / "objects.npz", weights=np.array([{}], dtype=object))
    with pytest.raises(UserError, match=r"objects\.npz is no readable"):
        convert.read_weights(tmp_path / "objects.npz")


def test_a_link_that_leads_nowhere_is_no_place_for_the_output(tmp_path):
    np.savez(tmp_path / "weights.npz", **sru_arrays())
    (tmp_path / "output").symlink_to(tmp_path / "elsewhere")
    flags = ["--package=sru", f"--weights={tmp_path / 'weights.npz'}", f"--output={tmp_path / 'output'}"]
    with pytest.raises(UserError, match="output exists: choose another --output"):
        convert.main(flags)
    assert not (tmp_path / "elsewhere").exists()

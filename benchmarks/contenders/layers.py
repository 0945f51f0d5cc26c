"""A layer of each kind, to be timed from any source tree."""


def layers(width: int) -> dict:
    """Makers of layers from and to so many channels, by name."""
    from models import lrn, memorizing_transformer, qrnn, r_transformer, rnn, sliding_window, sru, tcn, transformer
    from models.block_recurrent_transformer import BlockRecurrentLayer

    of_window = {"heads": 4, "head_dim": 64, "mlp_dim": 4 * width, "window": 128}
    recurrent = {**of_window, "states": 128, "dim": width}
    return {
        "sliding_window": lambda: sliding_window.SlidingWindowLayer(**of_window),
        "sliding_window_paper": lambda: sliding_window.SlidingWindowLayer(
            **of_window, sees_itself=True, mask_empty=True
        ),
        **{
            f"recurrent_{gate}_{configuration}": lambda g=gate, c=configuration: BlockRecurrentLayer(
                **recurrent, gate=g, configuration=c
            )
            for gate, configuration in (("fixed", "skip"), ("lstm", "skip"), ("fixed", "single"), ("lstm", "dual"))
        },
        "memorizing": lambda: memorizing_transformer.MemorizingLayer(**of_window, memory=1024),
        "transformer": lambda: transformer.TransformerLayer(width, heads=4, context=128),
        "r_transformer_gru": lambda: r_transformer.RTransformerLayer(width, heads=4, context=128),
        "r_transformer_lrn": lambda: r_transformer.RTransformerLayer(width, heads=4, context=128, cell="lrn"),
        "tcn": lambda: tcn.TCNLayer(width, width, kernel_size=3, dilation=4),
        "qrnn": lambda: qrnn.QRNNLayer(width, width),
        "sru": lambda: sru.SRULayer(width, width),
        "sru_projected": lambda: sru.SRULayer(width, width, projection=width // 4),
        "srupp": lambda: sru.SRUppLayer(width, width, projection=width // 4, context=128),
        **{unit: lambda unit=unit: lrn.LRNLayer(width, width, unit=unit) for unit in lrn.UNITS},
        "atr": lambda: lrn.ATRLayer(width, width),
        **{cell: lambda cell=cell: rnn.RNNLayer(width, width, cell=cell) for cell in rnn.CELLS},
    }

"""Every layer that exists: a line here puts a layer under all the laws."""

from collections.abc import Callable
from dataclasses import dataclass

from flax import linen as nn

from block_recurrent.layers.adaptive import Adaptive
from block_recurrent.layers.heads import MixtureOfSoftmaxes, Tied, Untied
from block_recurrent.layers.language_model import LanguageModel
from block_recurrent.layers.signal_heads import Classifier, Notes
from block_recurrent.layers.stack import pattern, stack
from models.block_recurrent_transformer import BlockRecurrentLayer
from models.feedback import feedback_stack
from models.lrn import ATRLayer, LRNLayer
from models.memorizing_transformer import MemorizingLayer
from models.qrnn import QRNNLayer, qrnn_layers
from models.r_transformer import ELEMENTWISE, RTransformerLayer
from models.rnn import RNNLayer
from models.sliding_window import SlidingWindowLayer
from models.sru import SRULayer, SRUppLayer
from models.tcn import tcn_layers
from models.transformer import Positions, TransformerLayer
from tests.reference.stack import run_feedback_stack, run_language_model, run_layer, run_stack


@dataclass(frozen=True)
class Case:
    """A layer, its slow reference, and its input: vectors of width `dim`, tokens, or records of so many bytes."""

    name: str
    layer: nn.Module
    reference: Callable  # (layer, params, x, state, start) -> (y, state), float64 NumPy
    dim: int = 12
    vocabulary: int | None = None
    record: int | None = None


def slide(**changes):
    return SlidingWindowLayer(**{"heads": 2, "head_dim": 8, "mlp_dim": 20, "window": 6, **changes})


def recurrent(gate="fixed", configuration="skip", **changes):
    sizes = {"heads": 2, "head_dim": 8, "mlp_dim": 20, "window": 4, "states": 3, "dim": 12}
    return BlockRecurrentLayer(**{**sizes, "gate": gate, "configuration": configuration, **changes})


def memorizing(**changes):
    sizes = {"heads": 2, "head_dim": 8, "mlp_dim": 20, "window": 4, "memory": 7, "top_k": 3, "search_tile": 5}
    return MemorizingLayer(**{**sizes, **changes})


def mixed():
    return stack(pattern("2*far near 2*far", {"near": slide(window=3), "far": slide()}))


def srupp(**changes):
    return SRUppLayer(**{"dim": 12, "width": 12, "projection": 6, "context": 5, "highway_bias": -1.0, **changes})


def r_transformer(**changes):
    return RTransformerLayer(**{"dim": 12, "heads": 2, "context": 5, "window": 3, **changes})


def with_head(name, head, vocabulary=17, record=None, **options):
    """A language model of one layer, for the sake of its head."""
    model = LanguageModel(vocabulary, 12, stack([slide(window=4)]), head=head, **options)
    inputs = {"record": record} if record else {"vocabulary": vocabulary}
    return Case(f"language_model_{name}", model, run_language_model, **inputs)


AS_IN_THE_PAPER = {"sees_itself": True, "mask_empty": True}

CASES = [
    Case("sliding_window", slide(), run_layer),
    Case("sliding_window_paper", slide(**AS_IN_THE_PAPER, query_tile=3), run_layer),
    Case("sliding_window_small_tiles", slide(query_tile=2), run_layer),
    Case("sliding_window_far", slide(window=20, query_tile=10), run_layer),
    Case("stack", mixed(), run_stack),
    *(
        Case(f"recurrent_{gate}_{configuration}", recurrent(gate, configuration, remat_update=remat), run_layer)
        for gate, remat in (("fixed", False), ("lstm", True))
        for configuration in ("dual", "single", "skip")
    ),
    Case(
        "stack_two_recurrent",
        stack([slide(window=4), recurrent(), slide(window=4), recurrent("lstm", "single")]),
        run_stack,
    ),
    Case("recurrent_paper", recurrent("lstm", "dual", z_bias=True, z_tanh="lstm", **AS_IN_THE_PAPER), run_layer),
    Case(
        "feedback", feedback_stack([slide(window=4), slide(window=4), recurrent(), slide(window=4)]), run_feedback_stack
    ),
    Case(
        "feedback_two_recurrent",
        feedback_stack([recurrent(), slide(window=2), recurrent("lstm", "single")], remat=True),
        run_feedback_stack,
    ),
    Case("memorizing", memorizing(), run_layer),  # its memory of 7 is full within three blocks
    Case("memorizing_never_full", memorizing(memory=40, top_k=24, relative_bias=False), run_layer),
    Case("memorizing_less_than_a_window", memorizing(window=6, memory=4, search="approximate"), run_layer),
    Case("memorizing_paper", memorizing(**AS_IN_THE_PAPER, search_tile=4), run_layer),
    Case(
        "stack_memorizing", stack([slide(window=4), memorizing(), memorizing(), slide(window=4)], remat=True), run_stack
    ),
    Case("qrnn_f", QRNNLayer(12, 10, window=1, pooling="f"), run_layer),
    Case("qrnn_fo", QRNNLayer(12, 10, window=2, zoneout=0.1, backend="associative"), run_layer),
    Case("qrnn_ifo", QRNNLayer(12, 10, window=4, pooling="ifo", backend="pallas"), run_layer),
    Case("qrnn_dense", stack(qrnn_layers(12, 5, 3, first_window=3, dense=True)), run_stack),
    Case("sru", SRULayer(12, 12, highway_bias=-1.0, rescale=True), run_layer),
    Case("sru_projected", SRULayer(12, 10, projection=4, norm="pre", backend="pallas"), run_layer),
    Case("sru_biased", SRULayer(12, 12, highway="projected", norm="post", biased=True), run_layer),
    Case("sru_without_highway", SRULayer(12, 10, highway=None, tanh=True), run_layer),
    Case("srupp", srupp(), run_layer),
    Case("srupp_pre_norm", srupp(width=10, heads=2, norm="pre", context=8, query_tile=2), run_layer),
    Case("srupp_post_norm", srupp(norm="post", attention_norm=False), run_layer),
    Case("srupp_without_attention", srupp(attention=False), run_layer),
    Case("lrn", LRNLayer(12, 10), run_layer),
    Case("lrn_paper", LRNLayer(12, 10, activation="identity", bias=False, norm="layer", backend="pallas"), run_layer),
    Case("olrn", LRNLayer(12, 10, unit="olrn", norm="rms"), run_layer),
    Case("glrn", LRNLayer(12, 10, unit="glrn"), run_layer),
    Case("elrn", LRNLayer(12, 10, unit="elrn"), run_layer),
    Case("atr", ATRLayer(12, 10), run_layer),
    Case("lstm", RNNLayer(12, 10), run_layer),
    Case("gru", RNNLayer(12, 10, cell="gru"), run_layer),
    Case("gru_reset_first", RNNLayer(12, 10, cell="gru", reset_first=True), run_layer),
    Case("rnn", RNNLayer(12, 10, cell="rnn"), run_layer),
    Case("tcn", stack(tcn_layers(12, 10, 3, kernel_size=2)), run_stack),
    Case("transformer", stack([Positions(), *[TransformerLayer(12, heads=3, context=4)] * 2]), run_stack),
    Case("transformer_periodic", stack([Positions(period=5), TransformerLayer(12, heads=2, context=3)]), run_stack),
    Case("r_transformer", r_transformer(context=8, query_tile=2), run_layer),
    Case("r_transformer_lstm", r_transformer(cell="lstm", local_layers=2), run_layer),
    Case("r_transformer_rnn", r_transformer(cell="rnn", window=7), run_layer),
    *(Case(f"r_transformer_{cell}", r_transformer(cell=cell), run_layer) for cell in ELEMENTWISE),
    Case(
        "stack_of_all_kinds",
        stack(
            [
                slide(),
                SRULayer(12, 12),
                SRULayer(12, 12),
                recurrent(window=6),
                QRNNLayer(12, 12),
                srupp(),
                RNNLayer(12, 12),
            ]
        ),
        run_stack,
    ),
    Case("language_model", LanguageModel(17, 12, mixed()), run_language_model, vocabulary=17),
    with_head("tied", Tied(scaled=False, bias=True), embedding_dim=8),
    with_head("untied", Untied(), embedding_dim=8, final_norm=False),
    with_head("mixture_of_softmaxes", MixtureOfSoftmaxes(experts=3)),
    with_head("adaptive", Adaptive(cutoffs=(6, 10), div_value=2), embedding_dim=8),
    with_head("adaptive_untied_projections", Adaptive(cutoffs=(7,), div_value=3, tie_projections=False)),
    with_head("notes", Notes(keys=19), vocabulary=19, record=3),
    with_head("notes_as_they_are", Notes(keys=12, projected=False), vocabulary=12, record=2),
    with_head("classifier", Classifier(classes=3), embedding_dim=8),
    with_head("classifier_of_pixels", Classifier(classes=3, pixels=True), vocabulary=256),
]

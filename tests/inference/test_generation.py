"""Generation, beam search and stop strings on a tiny model: what is drawn, from where, and until when."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.inference.beams import BeamSearch
from block_recurrent.inference.generation import Generator, Reader, Sampling
from block_recurrent.inference.stop_strings import UntilStop, ends_in_stop, texts_of
from block_recurrent.layers.language_model import LanguageModel
from block_recurrent.layers.stack import stack, unstacked_params
from tests.laws.registry import memorizing, recurrent, slide

V = 17
MODEL = LanguageModel(V, 12, stack([slide(window=4), slide(window=4), recurrent(), memorizing()]))
SHORT, BLOCK, LONG = [3], [1, 5, 9, 2], [7, 1, 16, 0, 4, 11, 2, 8, 3, 13, 6]  # prompts around a block of 4


@pytest.fixture(scope="module")
def params():
    tokens = jnp.zeros((1, MODEL.block), jnp.int32)
    initialise = jax.jit(lambda: MODEL.init(jax.random.key(4), tokens, MODEL.initial_state(1), tokens.astype(bool)))
    return nn.unbox(initialise())["params"]


@pytest.fixture(scope="module")
def greedy(params):
    return Generator(MODEL, params, Sampling(temperature=0))


@pytest.fixture(scope="module")
def drawing(params):
    return Generator(MODEL, params, Sampling())


def continued(generator, prompts, tokens=20, **options):
    """New tokens of each row."""
    rows = np.stack(list(generator(prompts, tokens, **options)), axis=1)
    return [[int(token) for token in row if token >= 0] for row in rows]


@jax.jit
def logits_of_padded(params, texts):
    start = jnp.zeros(texts.shape, bool).at[:, 0].set(True)
    return MODEL.apply({"params": params}, texts, MODEL.initial_state(len(texts)), start)[0]


def logits_of(params, texts):
    """Logits [b n v] of texts of one length, in one pass."""
    texts = np.asarray(texts)
    n = texts.shape[1]
    return np.array(logits_of_padded(params, np.pad(texts, ((0, 0), (0, 48 - n))))[:, :n])


@pytest.fixture(scope="module")
def state_after(params):
    """The state that texts of one length leave."""

    @jax.jit
    def read(texts):
        start = jnp.zeros(texts.shape, bool).at[:, 0].set(True)
        return MODEL.apply({"params": params}, texts, MODEL.initial_state(len(texts)), start)[1]

    return lambda *texts: read(np.asarray(texts))


def test_greedy_generation_follows_the_model(params, greedy):
    """Each new token is the likeliest given everything before it, in one pass over the finished text."""
    (new,) = continued(greedy, [LONG], tokens=30)
    assert len(new) == 30
    logits = logits_of(params, [LONG + new])[0, len(LONG) - 1 : -1]
    np.testing.assert_array_equal(np.argmax(logits, axis=-1), new)


def test_prompts_of_different_lengths_share_a_batch(greedy):
    """Each continues as it does alone: shorter than a block, a block, and longer."""
    for prompts in ([SHORT, LONG], [LONG, BLOCK]):
        assert continued(greedy, prompts) == [continued(greedy, [prompt])[0] for prompt in prompts]


def test_seeds_reproduce_and_rows_differ(drawing):
    first, again, other = (continued(drawing, [SHORT, SHORT], seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first[0] != first[1]


def test_a_rows_draws_are_its_own(drawing):
    """Neither the number of other rows nor the lengths of their prompts change what one draws."""
    first, second = continued(drawing, [LONG, BLOCK])
    assert continued(drawing, [LONG])[0] == first
    assert continued(drawing, [SHORT, BLOCK])[1] == second


def test_generation_compiles_once_and_keeps_its_state_size(drawing):
    """Constant time and memory per token: one program for every position, far beyond window x layers."""

    def compiled():
        return drawing._steps._cache_size(), drawing._reader._read._cache_size()

    list(drawing([LONG], tokens=1))
    before = compiled()
    list(drawing([LONG], tokens=100))
    list(drawing([LONG + LONG], tokens=3, state=MODEL.initial_state(1)))
    assert compiled() == before


@pytest.mark.parametrize("read", [3, 8])
def test_generation_goes_on_from_a_state(greedy, state_after, read):
    """As if the prompt had been longer, from inside a block and from its edge, and the state can be used again."""
    state = state_after(LONG[:read])
    expected = continued(greedy, [LONG + LONG])
    for _ in range(2):
        assert continued(greedy, [LONG[read:] + LONG], state=state) == expected


def test_a_state_of_one_row_serves_all_prompts(greedy, state_after):
    expected = [continued(greedy, [LONG + prompt])[0] for prompt in (BLOCK, SHORT)]
    assert continued(greedy, [BLOCK, SHORT], state=state_after(LONG)) == expected


def test_a_state_for_each_prompt(greedy, state_after):
    state = state_after(LONG[:8], BLOCK + BLOCK)
    expected = [continued(greedy, [text + SHORT])[0] for text in (LONG[:8], BLOCK + BLOCK)]
    assert continued(greedy, [SHORT, SHORT], state=state) == expected
    with pytest.raises(UserError, match="a state of 2 rows"):
        continued(greedy, [SHORT] * 3, state=state)


def test_repetition_penalty_follows_each_rows_text(params):
    """CTRL's: of tokens in the text so far, positive logits are divided and negative ones multiplied."""
    penalty = 1.7
    penalised = Generator(MODEL, params, Sampling(temperature=0, repetition_penalty=penalty))
    prompts = [BLOCK, LONG]
    for prompt, new in zip(prompts, continued(penalised, prompts, tokens=12), strict=True):
        text = prompt + new
        logits = logits_of(params, [text])[0]
        for at in range(len(prompt), len(text)):
            scores = logits[at - 1]
            for token in set(text[:at]):
                scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
            assert np.argmax(scores) == text[at]


def draws(sampling, logits, count=300):
    logits = jnp.tile(jnp.asarray(logits), (count, 1))
    keys = jax.random.split(jax.random.key(0), count)
    return set(np.asarray(sampling(logits, keys, jnp.zeros(logits.shape, bool))).tolist())


def test_sampling():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert draws(Sampling(), logits) == {0, 1, 2, 3}
    assert draws(Sampling(temperature=0), logits) == {0}
    assert draws(Sampling(top_k=2), logits) == {0, 1}
    assert draws(Sampling(top_k=9), logits) == {0, 1, 2, 3}
    assert draws(Sampling(top_p=0.65), logits) == {0, 1}
    assert draws(Sampling(top_p=0.75), logits) == {0, 1, 2}
    assert draws(Sampling(top_p=1e-6), logits) == {0}
    assert draws(Sampling(temperature=1e-3), logits) == draws(Sampling(temperature=1e-300), logits) == {0}
    assert draws(Sampling(min_p=0.45), logits) == {0, 1, 2}
    assert draws(Sampling(min_p=0.7), logits) == {0, 1}
    assert draws(Sampling(min_p=1), logits) == {0}
    assert draws(Sampling(min_p=0), logits) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": np.nan},
        {"temperature": 1e300},
        {"top_k": 2.5},
        {"top_p": np.nan},
        {"repetition_penalty": 1e300},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
    ],
)
def test_wrong_sampling_is_told(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        Sampling(**wrong)


BANNED = range(5, V)  # leaves five tokens: all continuations by three are 125


def every_continuation(params, prompt):
    """All by three tokens [b 3], and the log probability of each of their tokens: the slow truth."""
    texts = np.array(list(itertools.product(range(5), repeat=3)))
    logits = logits_of(params, [[*prompt, *text] for text in texts])
    steps = jax.nn.log_softmax(logits[:, len(prompt) - 1 : -1, :5])
    return texts, np.take_along_axis(np.asarray(steps), texts[..., None], axis=-1)[..., 0]


def best_of_all(params, prompt):
    texts, steps = every_continuation(params, prompt)
    totals = steps.sum(axis=1)
    return [(texts[i].tolist(), totals[i]) for i in np.argsort(-totals)[:25]]


def assert_same(found, expected):
    assert [text for text, _ in found] == [text for text, _ in expected]
    np.testing.assert_allclose([total for _, total in found], [total for _, total in expected], rtol=1e-4)


@pytest.fixture(scope="module")
def wide_search(params):
    """As many beams as there are continuations by two tokens: none that matters is lost."""
    return BeamSearch(MODEL, params, beams=25, banned=BANNED)


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["one token", "longer than a block"])
def test_enough_beams_find_the_best_of_all(params, wide_search, prompt):
    assert_same(wide_search(prompt, 3), best_of_all(params, prompt))


def test_beam_search_goes_on_from_a_state(params, wide_search, state_after):
    state, expected = state_after(LONG), best_of_all(params, LONG + BLOCK)
    for _ in range(2):
        assert_same(wide_search(BLOCK, 3, state=state), expected)
    with pytest.raises(UserError, match="a state of 2 rows"):
        wide_search(BLOCK, 3, state=state_after(SHORT, SHORT))


def test_one_beam_is_greedy(params, greedy):
    ((found, _),) = BeamSearch(MODEL, params, beams=1)(LONG, tokens=12)
    assert found == continued(greedy, [LONG], tokens=12)[0]


def test_beam_search_never_finds_a_less_likely_text_than_greedy(params):
    """Of a model as sharp as a trained one, whose beams leave the greedy text for what turns out worse."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    normal = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    search, greedy = (BeamSearch(MODEL, jax.tree.unflatten(tree, normal), beams) for beams in (2, 1))
    for seed in range(40):
        prompt = np.random.default_rng(seed).integers(V, size=5).tolist()
        (_, found), *_ = search(prompt, 24)
        ((_, least),) = greedy(prompt, 24)
        assert found >= least - 1e-4 * abs(least), f"seed {seed}"


def test_finished_beams_stay_as_they_are(params, wide_search):
    """Texts end with token 2, and are compared over their own lengths."""
    totals = {}
    for text, steps in zip(*every_continuation(params, BLOCK), strict=True):
        length = 1 + [*text[:-1], 2].index(2)
        totals[tuple(text[:length].tolist())] = steps[:length].sum()
    of_mean = BeamSearch(MODEL, params, 25, length_penalty=1.0, banned=BANNED)
    for search, rank in ((wide_search, totals.get), (of_mean, lambda text: totals[text] / len(text))):
        best = sorted(totals, key=rank, reverse=True)[:25]
        found = search(BLOCK, 3, finished=lambda tokens: tokens[-1] == 2)
        assert_same(found, [(list(text), totals[text]) for text in best])


def test_fewer_texts_than_beams(wide_search):
    assert len(wide_search(SHORT, 1)) == 5


@pytest.mark.parametrize(
    ("wrong", "message"), [({"seed": 10**20}, "seed is 1000"), ({"seed": -1}, "seed is -1"), ({"tokens": 0}, "tokens")]
)
def test_wrong_draws_are_told(drawing, wrong, message):
    with pytest.raises(UserError, match=message):
        list(drawing([SHORT], **{"tokens": 3, **wrong}))


@pytest.mark.parametrize("wrong", [{"beams": 0}, {"beams": 2, "length_penalty": -1.0}])
def test_wrong_beams_are_told(params, wrong):
    with pytest.raises(UserError, match=list(wrong)[-1]):
        BeamSearch(MODEL, params, **wrong)


TEXT = "naïve «café» 10 €, sto"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        ([], TEXT),
        (["stop"], TEXT),
        (["café"], "naïve «"),
        (["€", "é»"], "naïve «caf"),
        (["e «caff", "«café» 1", "10 €, x"], "naïve "),
        (["ïve «café» 10 €, sto"], "na"),
    ],
)
def test_text_is_cut_before_a_stop_string_wherever_tokens_end(size, stops, expected):
    content = TEXT.encode()
    pieces = [content[at : at + size] for at in range(0, len(content), size)]
    text = UntilStop([stop.encode() for stop in stops])
    shown = b"".join(map(text.add, pieces))
    assert (shown + text.held).decode() == expected
    assert text.stopped == (expected != TEXT)


def letter(token):
    return bytes([ord("a") + token])


def test_rows_stop_by_themselves_and_generation_when_all_have(greedy):
    """The second row's text is not cut by the first one's stop string, and nothing is drawn after both."""
    prompts = [BLOCK, LONG]
    full = [b"".join(map(letter, new)) for new in continued(greedy, prompts, tokens=30)]
    stops = [full[0][3:6], full[1][10:13]]
    expected = [text[: min(text.find(stop) for stop in stops if stop in text)] for text in full]
    columns = greedy(prompts, 30)
    shown = list(texts_of(columns, letter, stops))
    assert [b"".join(row) for row in zip(*shown, strict=True)] == expected
    assert next(columns)[1] >= 0, "generation went on to its end"


def test_a_text_held_back_is_shown_in_the_end():
    columns = [np.array([0, -1]), np.array([1, 2])]
    assert list(texts_of(columns, letter, [b"abc"])) == [[b"", b""], [b"", b"c"], [b"ab", b""]]


def test_beams_end_in_a_stop_string():
    ends = ends_in_stop(letter, [b"abc", b"x"])
    assert ends([1, 0, 1, 2]) and ends([23]) and not ends([0, 1]) and not ends_in_stop(letter, [])([0])


@pytest.mark.parametrize("remat", [False, True])
def test_parameters_are_cast_once_and_change_no_bit(remat):
    """In bfloat16 the generator keeps a bfloat16 copy of all that its steps only ever cast; norms stay float32."""
    layers = [slide(window=4, dtype=jnp.bfloat16), recurrent("lstm", "dual", dtype=jnp.bfloat16)]
    model = LanguageModel(V, 12, stack(layers, remat=remat), dtype=jnp.bfloat16)
    tokens, start = jnp.zeros((2, 4), jnp.int32), jnp.zeros((2, 4), bool)
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), tokens, model.initial_state(2), start))["params"]
    reader = Reader(model, params)
    changed = {
        jax.tree_util.keystr(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(reader.params)
    }
    wide = {name for name, dtype in changed.items() if dtype == jnp.float32}
    assert "['embedding']" not in wide
    assert {name for name in wide if "kernel" in name or "hidden" in name or "output" in name} == set()
    assert "['final_norm']" in wide

    step = jax.jit(lambda params, token, state: reader.model.apply({"params": params}, token, state, start[:, :1]))
    whole = {**params, "stack": unstacked_params(model.stack, params["stack"])}
    state = other_state = reader.model.for_decoding(reader.model.initial_state(2))
    for token in np.random.default_rng(0).integers(0, V, (9, 2, 1)):
        logits, state = step(reader.params, token, state)
        plain, other_state = step(whole, token, other_state)
        np.testing.assert_array_equal(logits, plain)

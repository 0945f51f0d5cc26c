"""Near-duplicates: found by the share of the smaller text's lines, wherever these stand."""

import numpy as np
import pytest

from block_recurrent.data.near_duplicates import SAMPLE, related, sample


def lines(rng, count) -> list[bytes]:
    return [b"line number %d" % number for number in rng.integers(0, 1 << 60, count)]


def found(texts) -> list[bool]:
    samples = [sample(text) for text in texts]
    together = np.concatenate([np.asarray(each, np.uint64) for each in samples])
    return related(together, np.asarray([len(each) for each in samples])).tolist()


def pairs_found(share: float, smaller: int, larger: int, pairs: int = 300) -> float:
    """The part of pairs that are found, of texts of so many lines that share a part of the smaller one's."""
    rng, texts = np.random.default_rng(0), []
    for _ in range(pairs):
        one = lines(rng, smaller)
        common = one[: round(share * smaller)]
        texts += [b"\n".join(one), b"\n".join(common + lines(rng, larger - len(common)))]
    return float(np.mean(found(texts)))


@pytest.mark.parametrize(("smaller", "larger"), [(30, 30), (300, 300), (300, 3000), (600, 20_000)])
def test_texts_that_share_most_lines_are_found_and_others_are_not(smaller, larger):
    pairs = 300 if larger < 10_000 else 40
    assert pairs_found(0.6, smaller, larger, pairs) > 0.9
    assert pairs_found(0.2, smaller, larger, pairs) < 0.05


def test_order_repetition_and_indentation_do_not_matter():
    some = lines(np.random.default_rng(1), 100)
    assert sample(b"\n".join(some)) == sample(b"\r\n".join(b"\t" + line for line in reversed(some + some)))


def test_trivial_lines_do_not_count():
    text = b"\n".join(lines(np.random.default_rng(1), 100))
    assert sample(text) == sample(text + b"\n}\n# " + b"-" * 70 + b"\nx = 1\n")


def test_a_text_of_few_lines_is_near_to_its_exact_copy_alone():
    text = b"one short line\nanother short line"
    assert found([text, text]) == [True, True]
    assert found([text, text + b"\n"]) == [False, False]


def test_many_copies_are_all_found():
    """More than any line is joined to."""
    rng = np.random.default_rng(2)
    common = lines(rng, 200)
    texts = [b"\n".join(common + lines(rng, 20)) for _ in range(100)]
    assert all(found([*texts, b"\n".join(lines(rng, 200))])[:100])


def test_a_licence_that_all_have_makes_no_near_duplicates():
    rng = np.random.default_rng(3)
    licence = lines(rng, 20)
    assert not any(found([b"\n".join(licence + lines(rng, 300)) for _ in range(60)]))


def test_samples_are_small_and_the_same_everywhere():
    some = [b"line number %d" % index for index in range(10_000)]
    assert len(sample(b"\n".join(some))) == 10_000 // 16 and len(sample(b"\n".join(some[:1000]))) == SAMPLE
    assert sample(b"\n".join(some[:10]))[0] == 1793411382330116881

import numpy as np
import pytest

from engine.guidance.matching import FewAllowed, FewForbidden, Mixed, new_bitmask, to_mask
from sluice.errors import SluiceError


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 4096, 5001])
@pytest.mark.parametrize(("share", "kind"), [(0.01, FewAllowed), (0.5, Mixed), (0.99, FewForbidden)])
def test_all_forms_do_the_same(vocab_size: int, share: float, kind: type) -> None:
    rng = np.random.default_rng(vocab_size)
    bits = rng.random(vocab_size) < share
    bits[0] = True
    bitmask = new_bitmask(vocab_size)
    bitmask.view(np.uint8)[: -(-vocab_size // 8)] = np.packbits(bits, bitorder="little")
    mask = to_mask(bitmask, vocab_size, vocab_size)
    assert mask is not None
    if vocab_size > 1000:
        assert isinstance(mask, kind)
    row = rng.normal(size=vocab_size).astype(np.float32)
    row[rng.random(vocab_size) < 0.1] = -np.inf  # another constraint was here before
    row[0] = 1
    expected = np.where(bits, row, np.float32(-np.inf))
    mask.apply(row)
    np.testing.assert_array_equal(row, expected)


def test_bits_beyond_what_is_usable_do_not_count() -> None:
    bitmask = new_bitmask(40)
    bitmask[:] = -1
    mask = to_mask(bitmask, 3, 10)
    assert mask is not None
    row = np.zeros(10, np.float32)
    mask.apply(row)
    assert np.flatnonzero(row == 0).tolist() == [0, 1, 2]


def test_what_others_forbid_is_not_chosen_in_their_stead() -> None:
    bitmask = new_bitmask(100)
    bitmask[0] = 0b110
    mask = to_mask(bitmask, 100, 100)
    assert mask is not None
    row = np.zeros(100, np.float32)
    row[1] = -np.inf
    mask.apply(row)
    assert np.flatnonzero(row == 0).tolist() == [2]
    row[2] = -np.inf
    with pytest.raises(SluiceError, match="bad_words, min_tokens or logit_bias"):
        mask.apply(row)


def test_the_empty_set() -> None:
    bitmask = new_bitmask(64)
    bitmask[1] = -1
    assert to_mask(bitmask, 32, 64) is None

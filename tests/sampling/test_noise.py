import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sampling.noise import gumbel_RV
from pallas_kernels.sampling.noise import gumbel_of_bits, scramble

_jitted = jax.jit(gumbel_RV, static_argnums=3)


def draw(seeds, positions, vocab_size):
    seeds = np.asarray(seeds, np.uint64)
    low, high = (seeds % 2**32).astype(np.uint32), (seeds >> np.uint64(32)).astype(np.uint32)
    return np.asarray(_jitted(jnp.asarray(low), jnp.asarray(high), jnp.asarray(positions, jnp.int32), vocab_size))


def test_noise_depends_on_seed_position_and_token_only():
    wide = draw([5, 6, 5, 5], [9, 9, 10, 9], 300)
    np.testing.assert_array_equal(wide[0], wide[3])
    np.testing.assert_array_equal(draw([5], [9], 64)[0], wide[0, :64])
    rows = {row.tobytes() for row in wide}
    assert len(rows) == 3


def test_every_bit_of_the_seed_counts():
    seeds = [0, *(1 << bit for bit in range(64))]
    rows = draw(seeds, [3] * len(seeds), 16)
    assert len({row.tobytes() for row in rows}) == len(seeds)


def test_noise_is_the_same_in_every_version_of_jax():
    found = draw([0x0123456789ABCDEF], [17], 4)[0]
    np.testing.assert_allclose(found, [2.197869, -0.918201, 0.112092, 1.601474], rtol=1e-5)


def uniform_of(gumbel):
    return np.exp(-np.exp(-gumbel.astype(np.float64)))


@pytest.mark.parametrize("shape", [(1, 65536), (65536, 1), (256, 256)], ids=["tokens", "positions", "both"])
def test_noise_is_gumbel_along_tokens_and_positions(shape):
    rows, vocab_size = shape
    uniform = uniform_of(draw([123] * rows, range(rows), vocab_size)).ravel()
    counts = np.histogram(uniform, bins=256, range=(0, 1))[0]
    chi_square = ((counts - 256) ** 2 / 256).sum()
    assert abs(chi_square - 255) < 5 * np.sqrt(2 * 255)


def test_neighbouring_tokens_positions_and_seeds_are_uncorrelated():
    grid = uniform_of(np.stack([draw([seed] * 64, range(64), 512) for seed in range(8)])) - 0.5
    for axis in range(3):
        a, b = np.take(grid, range(grid.shape[axis] - 1), axis), np.take(grid, range(1, grid.shape[axis]), axis)
        correlation = (a * b).mean() / grid.var()
        assert abs(correlation) < 5 / np.sqrt(a.size)


def test_all_bits_give_finite_noise_and_the_upper_tail_is_fine():
    bits = np.array([0, 1, 2, 1 << 8, 1 << 31, 2**32 - 2, 2**32 - 1], np.uint32)
    found = np.asarray(jax.jit(gumbel_of_bits)(bits))
    assert np.all(np.isfinite(found)) and np.all(np.diff(found) <= 0)
    expected = -np.log(-np.log1p(-(bits[:5].astype(np.float64) + 0.5) / 2**32))
    np.testing.assert_allclose(found[:5], expected, rtol=2e-6)
    assert found[0] > 22.8 and found[-1] < -2.7


def test_the_hash_is_a_bijection_that_spreads_single_bits():
    x = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    assert len(np.unique(scramble(jnp.arange(1 << 16, dtype=jnp.uint32)))) == 1 << 16
    for bit in range(32):
        changed = np.asarray(scramble(jnp.asarray(x)) ^ scramble(jnp.asarray(x ^ np.uint32(1 << bit))))
        assert 15 < np.bitwise_count(changed).mean() < 17

"""Steps with several tokens a row: their positions, their ids, and which of them count. Compared with plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache_spec import FullCache, WindowCache, cache_layout
from jaxllm.runner.drafter import NO_DRAFT
from jaxllm.runner.features.drafts.rows import DraftRows, accept, continues, latest_and_drafts, note_computed, resolve_starts
from jaxllm.runner.latest_tokens import LatestTokens
from jaxllm.runner.layout import FROM_ROW, NUM_ROW_COLUMNS, Column
from jaxllm.runner.places import Places, at_positions, each_draw, first_of_each, latest_or_known, locate, locate_decode
from jaxllm.runner.row_arrays import RowArrays
from jaxllm.scheduler_output import NOT_FINITE

# Operation by operation each of them would be dozens of programs.
locate, locate_decode = (jax.jit(function, static_argnums=(2, 3)) for function in (locate, locate_decode))
at_positions = jax.jit(at_positions, static_argnums=4)
NUM_ROWS, NUM_DRAFTS, BLOCK_SIZE, MAX_BLOCKS = 6, 3, 4, 8
WIDTH, TRASH = NUM_DRAFTS + 1, NUM_ROWS
CACHE = cache_layout([FullCache(1, 4, "float32"), WindowCache(1, 4, "float32", 5)], block_size=BLOCK_SIZE, max_step_tokens=16)
RNG = np.random.default_rng(0)
TABLE = RNG.permutation(np.arange(1, 1 + (NUM_ROWS + 1) * 2 * MAX_BLOCKS)).reshape(NUM_ROWS + 1, -1).astype(np.int32)


def columns(*rows: dict[str, int]) -> np.ndarray:
    """A row of the step each; one that samples unless it is given another TOKEN_ROW."""
    found = np.zeros((len(rows), NUM_ROW_COLUMNS), np.int32)
    for column_C, row in zip(found, rows, strict=True):
        for name, value in {"TOKEN_ROW": row["ROW"], **row}.items():
            column_C[Column[name]] = value
    return found


PADDING = {"ROW": TRASH}
DECODE = columns(
    {"ROW": 4, "START": 9, "NUM_TOKENS": 4, "NUM_DRAFTS": 3},
    {"ROW": 0, "START": 14, "NUM_TOKENS": 2, "NUM_DRAFTS": 1},
    {"ROW": 2, "START": 30, "NUM_TOKENS": 1, "WRITE_FROM": 31},
    {"ROW": 5, "START": 7, "NUM_TOKENS": 3, "NUM_DRAFTS": 2, "WRITE_FROM": 8},
    PADDING,
)
MIXED = columns(
    {"ROW": 4, "START": 9, "NUM_TOKENS": 4, "NUM_DRAFTS": 3},
    {"ROW": 1, "START": 0, "NUM_TOKENS": 5},
    {"ROW": 3, "START": 4, "NUM_TOKENS": 6, "WRITE_FROM": 6, "TOKEN_ROW": TRASH},
    PADDING,
)


def check_slots(places: Places, step: np.ndarray, first_tokens: list[int], width: int = 1) -> None:
    """Each real token of a row is where its position says, in both groups; shared positions and padding are not written.

    width: places of each row. Those behind its tokens are written as far as its last page reaches, which stands in place of later ones.
    """
    places = jax.tree.map(np.asarray, places)
    is_real = np.zeros(len(places.position_T), bool)
    is_kept = is_real.copy()
    last_pages = np.maximum(step[:, Column.START] + step[:, Column.NUM_TOKENS] - 1, 0) // BLOCK_SIZE
    for index, (row, first) in enumerate(zip(step, first_tokens, strict=True)):
        for offset in range(max(row[Column.NUM_TOKENS], width if row[Column.NUM_TOKENS] else 0)):
            token, position = first + offset, row[Column.START] + offset
            is_real[token] = offset < row[Column.NUM_TOKENS]
            is_kept[token] = position // BLOCK_SIZE <= last_pages[index]
            if not is_kept[token]:
                continue
            assert (places.owner_T[token], places.offset_T[token]) == (index, offset)
            assert (places.row_T[token], places.position_T[token]) == (row[Column.ROW], position)
            for group, table in enumerate(places.tables):
                block = TABLE[row[Column.ROW], group * MAX_BLOCKS + position // BLOCK_SIZE]
                slot = block * BLOCK_SIZE + position % BLOCK_SIZE if position >= row[Column.WRITE_FROM] else -1
                assert table.slot_T[token] == slot
    np.testing.assert_array_equal(places.is_real_T, is_real)
    for group, table in enumerate(places.tables):
        assert (table.slot_T[~is_kept] == -1).all()
        index_RB = np.arange(group * MAX_BLOCKS, (group + 1) * MAX_BLOCKS)[None].repeat(len(step), axis=0)
        if width > 1:  # a page for tokens behind the longest length too
            index_RB = np.minimum(np.pad(index_RB, ((0, 0), (0, 1)), mode="edge"), group * MAX_BLOCKS + last_pages[:, None])
        np.testing.assert_array_equal(table.page_table_RB, TABLE[step[:, Column.ROW][:, None], index_RB])


def test_tokens_of_a_ragged_step_lie_one_after_the_other():
    places = locate(jnp.asarray(TABLE), jnp.asarray(MIXED), 16, CACHE)
    check_slots(places, MIXED, [0, 4, 9, 15])
    assert places.query_start_R1.tolist() == [0, 4, 9, 15, 15] and places.kv_length_R.tolist() == [13, 5, 10, 0]
    assert places.num_queries is None and places.rows.is_new_R.tolist()[:3] == [False, True, False]


@pytest.mark.parametrize("width", [1, WIDTH])
def test_tokens_of_a_decode_lie_at_multiples_of_its_width(width):
    step = DECODE.copy()
    step[:, Column.NUM_TOKENS] = np.minimum(step[:, Column.NUM_TOKENS], width)
    places = locate_decode(jnp.asarray(TABLE), jnp.asarray(step), width, CACHE)
    check_slots(places, step, [index * width for index in range(len(step))], width)
    assert places.num_queries == width
    # Attention counts the last of `width` queries back from here, so that the first of them, which are real, see what they may.
    assert places.kv_length_R.tolist() == [9 + width, 14 + width, 30 + width, 7 + width, 0]


def test_a_drafter_writes_at_any_position_that_has_a_block():
    row, position, limit = np.array([4, 0, 2, TRASH]), np.array([11, 16, 31, 0]), np.array([12, 16, 32, 0])
    places = at_positions(jnp.asarray(TABLE), *map(jnp.asarray, (row, position, limit)), CACHE)
    assert places.is_real_T.tolist() == [True, False, True, False]
    assert places.kv_length_R.tolist() == [12, 0, 32, 0] and places.position_T.tolist() == position.tolist()
    for group, table in enumerate(places.tables):
        blocks = TABLE[row, group * MAX_BLOCKS + position // BLOCK_SIZE]
        slots = np.where(position < limit, blocks * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        np.testing.assert_array_equal(table.slot_T, slots)


def draft_rows(draft_NK: np.ndarray) -> DraftRows:
    count = NUM_ROWS + 1
    return DraftRows(
        jnp.arange(count, dtype=jnp.int32) * 10,
        jnp.asarray(draft_NK),
        jnp.full((count, WIDTH), 99, jnp.int32),
        jnp.zeros(count),
    )


def test_ids_that_the_host_does_not_know_are_the_last_drawn_and_the_drafts():
    draft_NK = np.arange(100, 100 + (NUM_ROWS + 1) * NUM_DRAFTS, dtype=np.int32).reshape(-1, NUM_DRAFTS)
    draft_NK[5, 1] = NO_DRAFT
    last_N, drafts = jnp.arange(NUM_ROWS + 1, dtype=jnp.int32), draft_rows(draft_NK)
    known = first_of_each(jnp.array([FROM_ROW, FROM_ROW, 77, FROM_ROW, 0], jnp.int32), WIDTH)
    places = locate_decode(jnp.asarray(TABLE), jnp.asarray(DECODE), WIDTH, CACHE)
    found = np.asarray(latest_or_known(latest_and_drafts(drafts, last_N, places), known)).reshape(-1, WIDTH)
    assert found[0].tolist() == [4, *draft_NK[4]]
    assert found[1, :2].tolist() == [0, draft_NK[0, 0]]
    assert found[2, 0] == 77
    assert found[3, :3].tolist() == [5, draft_NK[5, 0], 0]  # a draft that does not exist is computed as some token
    assert (found >= 0).all()
    known_T = jnp.array([FROM_ROW] * 4 + [*range(50, 55)] + [*range(60, 66)] + [0], jnp.int32)
    places = locate(jnp.asarray(TABLE), jnp.asarray(MIXED), 16, CACHE)
    found = latest_or_known(latest_and_drafts(drafts, last_N, places), known_T)
    assert found.tolist() == [
        4,
        *draft_NK[4],
        *range(50, 55),
        *range(60, 66),
        0,
    ]
    rows = RowArrays(last_N, None, {})
    assert LatestTokens().token_ids(rows, known_T, places).tolist()[3:5] == [4, 50]


def test_positions_that_only_the_device_knows():
    step = MIXED.copy()
    step[0, Column.START] = FROM_ROW
    drafts = draft_rows(np.zeros((NUM_ROWS + 1, NUM_DRAFTS), np.int32))
    resolved = resolve_starts(drafts, jnp.asarray(step))
    assert resolved[:3, Column.START].tolist() == [40, 0, 4]
    np.testing.assert_array_equal(np.delete(resolved, Column.START, 1), np.delete(step, Column.START, 1))
    assert LatestTokens().resolved(None, step) is step
    counted = note_computed(drafts, resolved).num_computed_N
    assert counted[:6].tolist() == [0, 5, 20, 10, 44, 50]


@pytest.mark.parametrize("step", [DECODE, MIXED], ids=["decode", "mixed"])
def test_each_draw_is_as_of_a_row_that_computes_one_token(step):
    draws = np.asarray(each_draw(jnp.asarray(step), WIDTH)).reshape(len(step), WIDTH, -1)
    for row, draws_WC in zip(step, draws, strict=True):
        first = row[Column.START] + row[Column.NUM_TOKENS] - 1 - row[Column.NUM_DRAFTS]
        assert draws_WC[:, Column.START].tolist() == [first + index for index in range(WIDTH)]
        assert (draws_WC[:, Column.NUM_TOKENS] == 1).all()
        others = [column for column in range(NUM_ROW_COLUMNS) if column not in (Column.START, Column.NUM_TOKENS)]
        assert (draws_WC[:, others] == row[others]).all()
    assert each_draw(step, 1) is step


@pytest.mark.parametrize("width", [1, WIDTH])
def test_drafts_count_up_to_the_first_that_was_not_drawn(width):
    """Compared with a loop on random drafts and draws of two tokens, in which the rows of a step come in any order."""
    rng, accepted = np.random.default_rng(1), jax.jit(accept)
    seen = set()
    for _ in range(60):
        draft_NK = rng.choice([0, 1, NO_DRAFT], (NUM_ROWS + 1, NUM_DRAFTS), p=[0.45, 0.45, 0.1]).astype(np.int32)
        token_RW = rng.choice([0, 1, NOT_FINITE], (NUM_ROWS, width), p=[0.48, 0.48, 0.04]).astype(np.int32)
        counts = rng.integers(0, width, NUM_ROWS)
        starts = rng.integers(1, 30, NUM_ROWS)
        step = columns(
            *(
                {"ROW": row, "START": start, "NUM_TOKENS": 1 + count, "NUM_DRAFTS": count}
                for row, start, count in zip(rng.permutation(NUM_ROWS), starts, counts, strict=True)
            )
        )
        step[-1, Column.TOKEN_ROW] = TRASH
        before = draft_rows(draft_NK)
        drafts, last_R, drawn_RX = jax.device_get(accepted(before, jnp.asarray(step), jnp.asarray(token_RW)))
        alive = [None] * width
        for index in range(width - 1):
            alive[index + 1] = np.asarray(continues(before, jnp.asarray(step), index, token_RW[:, index], alive[index]))
        for place, (row, tokens) in enumerate(zip(step, token_RW.tolist(), strict=True)):
            expected = draft_NK[row[Column.ROW], : counts[place]].tolist()
            num_right = 0
            while num_right < len(expected) and expected[num_right] == tokens[num_right]:
                num_right += 1
            drawn = tokens[: 1 + num_right]
            seen.add((len(expected), num_right))
            assert drawn_RX[place].tolist() == [
                *drawn,
                *[NO_DRAFT] * (width - len(drawn)),
                sum(draft != NO_DRAFT for draft in expected),
            ]
            assert last_R[place] == drawn[-1]
            assert [bool(mask[place]) for mask in alive[1:]] == [index <= num_right for index in range(1, width)]
            if row[Column.TOKEN_ROW] != TRASH:
                assert drafts.num_computed_N[row[Column.ROW]] == starts[place] + 1 + num_right
                kept = drafts.drawn_NW[row[Column.ROW]].tolist()
                assert kept == [*drawn, *[NO_DRAFT] * (WIDTH - len(drawn))]
            else:  # a row that samples nothing keeps what it has
                assert drafts.num_computed_N[row[Column.ROW]] == 10 * row[Column.ROW]
                assert drafts.drawn_NW[row[Column.ROW]].tolist() == [99] * WIDTH
    assert len(seen) == width * (width + 1) // 2

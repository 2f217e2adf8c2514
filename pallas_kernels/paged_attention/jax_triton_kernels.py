"""Paged attention as plain Triton kernels. Imported only where triton is installed; arrays are dense, as JAX makes them.

The tilings are those of triton_decode.py and triton_prefill.py: a program holds the G query heads of one KV head and walks keys
through the page table in tiles of BLOCK_K, with the softmax online in base 2.
"""

import triton
import triton.language as tl

MASKED = tl.constexpr(-1e30)  # finite, so that a wholly masked tile gives no NaN; the first valid score wipes what it added
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    q_MH,
    acc_MH,
    max_M,
    sum_M,
    k_ptr,
    v_ptr,
    table_ptr,
    head,
    row,
    position_k,
    readable_k,
    visible_Mk,
    score_scale,
    SOFT_CAP: tl.constexpr,  # in base 2, or None
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
):
    """Adds the keys at some positions of a row to the running softmax."""
    dim_H = tl.arange(0, PADDED_DIM)
    page_index_k = tl.minimum(position_k // PAGE_SIZE, TABLE_WIDTH - 1)
    page_k = tl.load(table_ptr + row * TABLE_WIDTH + page_index_k).to(tl.int64)
    slot_k = (page_k * NUM_KV_HEADS + head) * PAGE_SIZE + position_k % PAGE_SIZE
    index_kH = slot_k[:, None] * HEAD_DIM + dim_H[None, :]
    # Lanes outside the row's own slots load nothing and give 0: what lies there may be NaN.
    mask_kH = readable_k[:, None] & (dim_H < HEAD_DIM)[None, :]
    k_kH = tl.load(k_ptr + index_kH, mask=mask_kH, other=0.0).to(q_MH.dtype)
    scores_Mk = tl.dot(q_MH, tl.trans(k_kH), input_precision="ieee") * score_scale
    if SOFT_CAP is not None:
        # cap * tanh(scores / cap), of one exponential: exact at both ends.
        scores_Mk = SOFT_CAP - (2 * SOFT_CAP) / (1 + tl.exp2(scores_Mk * (2 * LOG2E / SOFT_CAP)))
    scores_Mk = tl.where(visible_Mk, scores_Mk, MASKED)
    new_max_M = tl.maximum(max_M, tl.max(scores_Mk, axis=1))
    weights_Mk = tl.exp2(scores_Mk - new_max_M[:, None])
    shrink_M = tl.exp2(max_M - new_max_M)
    v_kH = tl.load(v_ptr + index_kH, mask=mask_kH, other=0.0).to(q_MH.dtype)
    acc_MH = acc_MH * shrink_M[:, None] + tl.dot(weights_Mk.to(q_MH.dtype), v_kH, input_precision="ieee")
    return acc_MH, new_max_M, sum_M * shrink_M + tl.sum(weights_Mk, axis=1)


@triton.jit
def decode_kernel(
    q_ptr,  # [R, K, G, H]
    k_ptr,  # [P, K, S, H]
    v_ptr,  # [P, K, S, H]
    table_ptr,  # [R, B]
    length_ptr,  # [R]
    out_ptr,  # [R, K, G, H] with one split, else [splits, R, K, G, H] float32
    lse_ptr,  # [splits, R, K, G] float32, base 2; not written with one split
    SCORE_SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,  # in base 2, or None
    WINDOW: tl.constexpr,  # or None
    IN_FLOAT32: tl.constexpr,  # queries and cache differ in type
    NUM_ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group_M = tl.arange(0, BLOCK_M)
    dim_H = tl.arange(0, PADDED_DIM)
    line_M = (row * NUM_KV_HEADS + head) * NUM_GROUPS + group_M
    mask_MH = (group_M < NUM_GROUPS)[:, None] & (dim_H < HEAD_DIM)[None, :]
    index_MH = line_M[:, None] * HEAD_DIM + dim_H[None, :]
    q_MH = tl.load(q_ptr + index_MH, mask=mask_MH, other=0.0)
    if IN_FLOAT32:
        q_MH = q_MH.to(tl.float32)

    length = tl.load(length_ptr + row)
    first_position = 0
    if WINDOW is not None:
        first_position = tl.maximum(length - WINDOW, 0)
    first_tile = first_position // BLOCK_K
    end_tile = tl.cdiv(length, BLOCK_K)
    per_split = tl.cdiv(end_tile - first_tile, NUM_SPLITS)
    begin = first_tile + split * per_split
    end = tl.minimum(begin + per_split, end_tile)

    acc_MH = tl.zeros((BLOCK_M, PADDED_DIM), tl.float32)
    max_M = tl.full((BLOCK_M,), MASKED, tl.float32)
    sum_M = tl.zeros((BLOCK_M,), tl.float32)
    for tile in range(begin, end):
        position_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        valid_k = (position_k < length) & (position_k >= first_position)
        acc_MH, max_M, sum_M = attend(
            q_MH,
            acc_MH,
            max_M,
            sum_M,
            k_ptr,
            v_ptr,
            table_ptr,
            head,
            row,
            position_k,
            valid_k,
            valid_k[None, :],
            SCORE_SCALE,
            SOFT_CAP,
            NUM_KV_HEADS,
            HEAD_DIM,
            PADDED_DIM,
            PAGE_SIZE,
            TABLE_WIDTH,
        )
    safe_sum_M = tl.where(sum_M == 0, 1.0, sum_M)
    out_MH = acc_MH / safe_sum_M[:, None]
    if NUM_SPLITS == 1:
        tl.store(out_ptr + index_MH, out_MH.to(out_ptr.dtype.element_ty), mask=mask_MH)
    else:
        lines = NUM_ROWS * NUM_KV_HEADS * NUM_GROUPS
        lse_M = tl.where(sum_M == 0, MASKED, max_M + tl.log2(safe_sum_M))
        tl.store(out_ptr + split * lines * HEAD_DIM + index_MH, out_MH, mask=mask_MH)
        tl.store(lse_ptr + split * lines + line_M, lse_M, mask=group_M < NUM_GROUPS)


@triton.jit
def combine_kernel(
    partial_ptr,  # [splits, lines, H] float32; a line is a row's query head
    lse_ptr,  # [splits, lines] float32, base 2
    out_ptr,  # [lines, H]
    NUM_LINES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
):
    """The splits of one query head, weighted by their share of the softmax sum; a split without keys has weight 0."""
    line = tl.program_id(0)
    split_s = tl.arange(0, PADDED_SPLITS)
    dim_H = tl.arange(0, PADDED_DIM)
    lse_s = tl.load(lse_ptr + split_s * NUM_LINES + line, mask=split_s < NUM_SPLITS, other=MASKED)
    weight_s = tl.exp2(lse_s - tl.max(lse_s, axis=0))
    mask_sH = (split_s < NUM_SPLITS)[:, None] & (dim_H < HEAD_DIM)[None, :]
    index_sH = (split_s * NUM_LINES + line)[:, None] * HEAD_DIM + dim_H[None, :]
    partial_sH = tl.load(partial_ptr + index_sH, mask=mask_sH, other=0.0)
    out_H = tl.sum(partial_sH * weight_s[:, None], axis=0) / tl.sum(weight_s, axis=0)
    tl.store(out_ptr + line * HEAD_DIM + dim_H, out_H.to(out_ptr.dtype.element_ty), mask=dim_H < HEAD_DIM)


@triton.jit
def prefill_kernel(
    q_ptr,  # [T, K, G, H]
    k_ptr,  # [P, K, S, H]
    v_ptr,  # [P, K, S, H]
    table_ptr,  # [R, B]
    tiles_ptr,  # [N, 4]: row, first token, number of tokens, position of the first token
    out_ptr,  # [T, K, G, H]
    SCORE_SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,  # in base 2, or None
    WINDOW: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    NUM_TILES: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # From the last tile down: the tiles of a row that see the most keys start first, the small ones fill the end.
    tile_ptr = tiles_ptr + (NUM_TILES - 1 - tl.program_id(0)) * 4
    head = tl.program_id(1)
    row = tl.minimum(tl.load(tile_ptr), NUM_ROWS - 1)
    token, count, position = tl.load(tile_ptr + 1), tl.load(tile_ptr + 2), tl.load(tile_ptr + 3)
    line_M = tl.arange(0, BLOCK_M)
    token_M = line_M // NUM_GROUPS
    dim_H = tl.arange(0, PADDED_DIM)
    mask_MH = (token_M < count)[:, None] & (dim_H < HEAD_DIM)[None, :]
    place_M = ((token + token_M).to(tl.int64) * NUM_KV_HEADS + head) * NUM_GROUPS + line_M % NUM_GROUPS
    index_MH = place_M[:, None] * HEAD_DIM + dim_H[None, :]
    q_MH = tl.load(q_ptr + index_MH, mask=mask_MH, other=0.0)
    if IN_FLOAT32:
        q_MH = q_MH.to(tl.float32)
    position_M = position + token_M

    # Tiles without tokens, and padding (positions below zero), see no keys.
    length = tl.where(count > 0, tl.maximum(position + count, 0), 0)
    begin = 0
    if WINDOW is not None:
        begin = tl.maximum(position - (WINDOW - 1), 0) // BLOCK_K
    acc_MH = tl.zeros((BLOCK_M, PADDED_DIM), tl.float32)
    max_M = tl.full((BLOCK_M,), MASKED, tl.float32)
    sum_M = tl.zeros((BLOCK_M,), tl.float32)
    for tile in range(begin, tl.cdiv(length, BLOCK_K)):
        position_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        readable_k = position_k < length
        visible_Mk = position_k[None, :] <= position_M[:, None]
        if WINDOW is not None:
            readable_k &= position_k > position - WINDOW
            visible_Mk &= position_k[None, :] > position_M[:, None] - WINDOW
        acc_MH, max_M, sum_M = attend(
            q_MH,
            acc_MH,
            max_M,
            sum_M,
            k_ptr,
            v_ptr,
            table_ptr,
            head,
            row,
            position_k,
            readable_k,
            visible_Mk,
            SCORE_SCALE,
            SOFT_CAP,
            NUM_KV_HEADS,
            HEAD_DIM,
            PADDED_DIM,
            PAGE_SIZE,
            TABLE_WIDTH,
        )
    out_MH = acc_MH / tl.where(sum_M == 0, 1.0, sum_M)[:, None]
    tl.store(out_ptr + index_MH, out_MH.to(out_ptr.dtype.element_ty), mask=mask_MH)

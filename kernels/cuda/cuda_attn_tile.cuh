/*
 * Which rows of attention a block and a warp have, what they read, and where
 * results go.  The kernels are in cuda_attn.cu, the arithmetic in
 * cuda_attn.cuh.
 *
 * A tile is a few rows of one sequence at consecutive positions.  Nobody lists
 * tiles: a warp counts through the sequences until it has found the one whose
 * number is its block's, so a step brings nothing but its batch to the device.
 */

#ifndef KERNELS_CUDA_CUDA_ATTN_TILE_CUH
#define KERNELS_CUDA_CUDA_ATTN_TILE_CUH

#include "kernels/cuda/cuda_attn_values.cuh"

enum {
    FEW_WARPS = OP_SPLIT / ATTN_TOKENS,
    PART_HEAD = 4 /* floats before o in a partial: maximum, sum */
};


/* --- tiles --- */

/* The sum of the lanes up to this one. */
static __device__ __forceinline__ int
warp_scan(int x)
{
#pragma unroll
    for (int i = 1; i < WARP_SIZE; i *= 2) {
        const int before = __shfl_up_sync(FULL_MASK, x, i);

        x += lane_id() >= i ? before : 0;
    }
    return x;
}


static __device__ __forceinline__ int
warp_lane(int x, int lane)
{
    return __shfl_sync(FULL_MASK, x, lane);
}


/* Which rows tile number `tile` has, among sequences of few or of many rows;
 * false: there are fewer tiles, or it is padding.  The whole warp looks. */
static __device__ bool
find_tile(const attn_args_t *args, int number, int per_tile, bool few,
          tile_t *tile)
{
    bool found = args->single;
    int seq = number, index = 0;

    for (int base = 0; base < args->n_seqs && !found; base += WARP_SIZE) {
        const int s = base + lane_id();
        int n = 0;

        if (s < args->n_seqs) {
            n = args->row_start[s + 1] - args->row_start[s];
        }

        const int tiles =
            (n <= args->few) == few ? (n + per_tile - 1) / per_tile : 0;
        const int upto = warp_scan(tiles);
        const unsigned after = __ballot_sync(FULL_MASK, number < upto);

        if (after != 0) {
            const int lane = __ffs((int) after) - 1;

            seq = base + lane;
            index = (number - warp_lane(upto - tiles, lane)) * per_tile;
            found = true;
        }
        number -= warp_lane(upto, WARP_SIZE - 1);
    }
    if (!found) {
        return false;
    }

    const int first = args->row_start[seq];
    const int n = args->row_start[seq + 1] - first - index;

    tile->seq = seq;
    tile->index = index;
    tile->row = first + index;
    tile->n = n < per_tile ? n : per_tile;
    tile->pos = args->pos[tile->row];
    return tile->pos >= 0;
}


/* The first split that a row at pos sees. */
static __device__ __forceinline__ int
first_split(const attn_args_t *args, int pos)
{
    const int from = pos + 1 - args->window;

    return args->window > 0 && from > 0 ? from / OP_SPLIT : 0;
}


/* The query of the tile that row i of the share belongs to; −1: none. */
static __device__ __forceinline__ int
query_of(const attn_args_t *args, const share_t *share, int i)
{
    const int query = (share->first + i) / args->group;

    return query < share->tile->n ? query : -1;
}


static __device__ __forceinline__ int
head_of(const attn_args_t *args, const share_t *share, int i)
{
    return share->kv_head * args->group + (share->first + i) % args->group;
}


/* Rows from … from + n − 1 of the share to fragments, and their units. */
template <int D, int TYPE>
static __device__ __forceinline__ void
put_queries(const attn_args_t *args, const share_t *share, uint16_t *fragments,
            float *units, int from, int n)
{
    const int n_all = args->n_heads + 2 * args->n_kv_heads;

    for (int r = from; r < from + n; r++) {
        const int query = query_of(args, share, r);
        float x[(D + 31) / 32];

#pragma unroll
        for (int i = 0; i < (D + 31) / 32; i++) {
            const int d = lane_id() + 32 * i;

            x[i] = 0.0f;
            if (query >= 0 && d < args->head_dim) {
                const size_t head = (size_t) (share->tile->row + query) * n_all
                                    + head_of(args, share, r);

                x[i] = args->q[head * args->head_dim + d] * args->scale;
            }
        }

        const float unit = attn_put_query<D, TYPE>(fragments, r, x);

        if (lane_id() == 0) {
            units[r] = unit;
        }
    }
}


static __device__ __forceinline__ void
clear_state(attn_state_t *state)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        state->max[r] = -INFINITY;
        state->sum[r] = 0.0f;
    }
}


/* What of the 64 tokens from `first` the share sees; false: nothing. */
static __device__ __forceinline__ bool
find_block(const attn_args_t *args, const share_t *share, int first,
           attn_block_t *block)
{
    const tile_t *tile = share->tile;
    const int last_row = (share->first + ATTN_ROWS - 1) / args->group;
    const int low = tile->pos + share->first / args->group;
    const int high = tile->pos + (last_row < tile->n ? last_row : tile->n - 1);
    const int n = high + 1 - first;

    if (n <= 0
        || (args->window > 0 && first + ATTN_TOKENS - 1 <= low - args->window))
    {
        return false;
    }

    block->args = args;
    block->share = share;
    block->first = first;
    block->end = high + 1;
    block->n_pages =
        n < ATTN_TOKENS ? (n + OP_PAGE - 1) / OP_PAGE : (int) ATTN_PAGES;

#pragma unroll
    for (int i = 0; i < ATTN_PAGES; i++) {
        block->page[i] = i < block->n_pages
                             ? record_of(args, share, first / OP_PAGE + i)
                             : NULL;
    }
    return true;
}


static __device__ __forceinline__ void
find_rows(const attn_args_t *args, const share_t *share, const float *units,
          attn_rows_t *rows)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int i = lane_id() / 4 + 8 * r;
        const int query = query_of(args, share, i);

        rows->pos[r] = query < 0 ? -1 : share->tile->pos + query;
        rows->unit[r] = units[i];
    }
}


/* --- results --- */

/* The last sum is of +0, so that 0 has one sign whoever computed it. */
static __device__ __forceinline__ float
finished(float o, float sum)
{
    return o / sum + 0.0f;
}


/* Tile n of the lane's row r to out. */
template <int D, int TYPE>
static __device__ __forceinline__ void
put_out(const attn_args_t *args, const share_t *share, int r, int n, float x,
        float y)
{
    const int i = lane_id() / 4 + 8 * r;
    const int c = lane_id() % 4 * 2;
    const size_t row = share->tile->row + query_of(args, share, i);
    float *to =
        args->out
        + (row * args->n_heads + head_of(args, share, i)) * args->head_dim;
    const int d = value_dim<D, TYPE>(n, c), e = value_dim<D, TYPE>(n, c + 1);

    if (d < args->head_dim) {
        to[d] = x;
    }
    if (e < args->head_dim) {
        to[e] = y;
    }
}


/* Where the partial of row i and of a split is. */
template <int D>
static __device__ __forceinline__ float *
part_of(const attn_args_t *args, const share_t *share, int i, int split)
{
    const size_t row = (size_t) share->tile->seq * args->few
                       + share->tile->index + query_of(args, share, i);

    return args->parts
           + ((row * args->n_heads + head_of(args, share, i)) * args->n_splits
              + split)
                 * (PART_HEAD + D);
}


/* Every warp writes the tiles n = warp, warp + 4, … of the lane's row r. */
template <int D, int TYPE>
static __device__ __forceinline__ void
put_split(const attn_args_t *args, const share_t *share, const float4 *o,
          const attn_state_t *state, int r, int split)
{
    const int i = lane_id() / 4 + 8 * r;
    const int query = query_of(args, share, i);
    const int pos = share->tile->pos + query;
    const int warp = (int) threadIdx.x / WARP_SIZE;

    if (query < 0 || split > pos / OP_SPLIT || split < first_split(args, pos)) {
        return;
    }

    const bool whole = first_split(args, pos) == pos / OP_SPLIT;
    float *part = whole ? NULL : part_of<D>(args, share, i, split);

    if (!whole && warp == 0 && lane_id() % 4 == 0) {
        part[0] = state->max[r];
        part[1] = state->sum[r];
    }
    for (int n = warp; n < D / 8; n += FEW_WARPS) {
        const float4 at = o[n * WARP_SIZE + lane_id()];
        const float x = r == 0 ? at.x : at.z, y = r == 0 ? at.y : at.w;

        if (whole) {
            put_out<D, TYPE>(args, share, r, n, finished(x, state->sum[r]),
                             finished(y, state->sum[r]));
        } else {
            const int c = lane_id() % 4 * 2;

            part[PART_HEAD + value_dim<D, TYPE>(n, c)] = x;
            part[PART_HEAD + value_dim<D, TYPE>(n, c + 1)] = y;
        }
    }
}

#endif /* KERNELS_CUDA_CUDA_ATTN_TILE_CUH */

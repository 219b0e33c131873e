/*
 * Paged attention on the GPU: what is computed where.  The arithmetic is in
 * cuda_attn.cuh; nothing here changes a result.
 *
 * A tile is a few rows of one sequence, as many as fill the warps with the
 * query heads of one KV head.  Sequences of few rows, decode and verification,
 * get a block for each split of 256 tokens, whose warps have 64 tokens each;
 * what they found goes to scratch, and combine_kernel() puts a row's splits
 * together.  Longer chunks have warps enough: there a warp has 16 rows and all
 * tokens that they see, split after split, and needs no scratch.
 */

#include "kernels/cuda/cuda_attn.cuh"

#include <stdio.h>

enum {
    FEW = 8, /* rows that a sequence of few rows has at most */
    FEW_WARPS = OP_SPLIT / ATTN_TOKENS,
    PART_HEAD = 4, /* floats before o in a partial: maximum, sum */
    COMBINE_THREADS = 32
};

static const size_t scratch_most = (size_t) 256 << 20;

typedef struct {
    float *out;
    const float *q;
    float *parts; /* [seq][row][head][split][PART_HEAD + dim] */
    const int32_t *pos;
    const int32_t *row_start;
    const int32_t *tables;
    const uint8_t *pages; /* of the layer */
    size_t page_bytes;
    size_t head_bytes;
    int n_seqs;
    int table_width;
    int n_heads;
    int n_kv_heads;
    int head_dim;
    int group;    /* query heads of a KV head */
    int few;      /* sequences of at most so many rows are of few rows */
    int single;   /* all sequences have one row */
    int n_splits; /* of the longest sequence */
    int window;
    float scale;
    float softcap;
} attn_args_t;

/* Rows of one sequence, at consecutive positions. */
typedef struct {
    int seq;
    int index; /* of the first among the sequence's rows */
    int row;   /* its number in the batch */
    int n;
    int pos; /* of the first */
} tile_t;

/* The part of a tile that a warp has: 16 of its rows times heads. */
typedef struct {
    const tile_t *tile;
    int kv_head;
    int first; /* number of the first */
} share_t;


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
 * false: there are fewer tiles.  The whole warp looks. */
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
    return true;
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
put_queries(const attn_args_t *args, const share_t *share,
            uint16_t *fragments, float *units, int from, int n)
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
    const int high =
        tile->pos + (last_row < tile->n ? last_row : tile->n - 1);
    const int n = high + 1 - first;

    if (n <= 0
        || (args->window > 0
            && first + ATTN_TOKENS - 1 <= low - args->window))
    {
        return false;
    }

    block->first = first;
    block->end = high + 1;
    block->window = args->window;
    block->softcap = args->softcap;
    block->n_pages =
        n < ATTN_TOKENS ? (n + OP_PAGE - 1) / OP_PAGE : (int) ATTN_PAGES;

    block->pages =
        args->pages + (size_t) share->kv_head * args->head_bytes;
    block->page_bytes = args->page_bytes;
    block->table = args->tables + (size_t) tile->seq * args->table_width
                   + first / OP_PAGE;

#pragma unroll
    for (int i = 0; i < ATTN_PAGES; i++) {
        const int page = i < block->n_pages ? block->table[i] : 0;

        block->page[i] = block->pages + page * block->page_bytes;
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
    float *to = args->out
                + (row * args->n_heads + head_of(args, share, i))
                      * args->head_dim;
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


/* --- kernels --- */

template <int D>
static constexpr __host__ __device__ size_t
fragment_words(void)
{
    return (size_t) D / 16 * WARP_SIZE * ATTN_FRAGMENT;
}


/* The blocks' states, one warp's after the other, to that of the split, in
 * the lanes' places of shared memory.  Returns it to all warps. */
template <int D>
static __device__ __forceinline__ attn_state_t
chain_warps(float4 *o_split, float4 *state_split, const float o[D / 8][4],
            const attn_state_t *later)
{
    const int warp = (int) threadIdx.x / WARP_SIZE;
    float4 *mine = state_split + lane_id();
    attn_state_t state;

    for (int w = 0; w < FEW_WARPS; w++) {
        if (w == warp) {
            clear_state(&state);
            if (w > 0) {
                state.max[0] = mine->x;
                state.max[1] = mine->y;
                state.sum[0] = mine->z;
                state.sum[1] = mine->w;
            }

            const attn_merge_t merge = merge_states(&state, later);

            *mine = make_float4(state.max[0], state.max[1], state.sum[0],
                                state.sum[1]);

#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                float4 *place = o_split + n * WARP_SIZE + lane_id();

                if (w == 0) {
                    *place = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                }
                merge_place(place, &merge, o[n]);
            }
        }
        __syncthreads();
    }

    state.max[0] = mine->x;
    state.max[1] = mine->y;
    state.sum[0] = mine->z;
    state.sum[1] = mine->w;
    return state;
}


template <int D>
static __device__ __forceinline__ void
clear_rows(float o[D / 8][4])
{
#pragma unroll
    for (int i = 0; i < D / 2; i++) {
        o[i / 4][i % 4] = 0.0f;
    }
}


template <int D>
static __device__ __forceinline__ void
clear_places(float4 *places)
{
    for (int n = 0; n < D / 8; n++) {
        places[n * WARP_SIZE + lane_id()] =
            make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}


/* A block: one KV head, 16 rows times heads of a tile, one split. */
template <int D, int TYPE>
static __global__ void
__launch_bounds__(FEW_WARPS *WARP_SIZE) few_kernel(attn_args_t args)
{
    __shared__ uint4 fragments[fragment_words<D>() / 4];
    __shared__ float4 o_split[D / 8 * WARP_SIZE];
    __shared__ float4 state_split[WARP_SIZE];
    __shared__ float units[ATTN_ROWS];

    const int shares = (args.group + ATTN_ROWS - 1) / ATTN_ROWS;
    const int per_tile = shares > 1 ? 1 : ATTN_ROWS / args.group;
    const int warp = (int) threadIdx.x / WARP_SIZE;
    const int split = (int) blockIdx.z;
    tile_t tile;

    if (!find_tile(&args, (int) blockIdx.y, per_tile, true, &tile)
        || split > (tile.pos + tile.n - 1) / OP_SPLIT
        || split < first_split(&args, tile.pos))
    {
        return;
    }

    const share_t share = { &tile, (int) blockIdx.x / shares,
                            (int) blockIdx.x % shares * ATTN_ROWS };

    put_queries<D, TYPE>(&args, &share, (uint16_t *) fragments, units,
                         warp * ATTN_ROWS / FEW_WARPS, ATTN_ROWS / FEW_WARPS);
    __syncthreads();

    float o[D / 8][4];
    attn_state_t state;
    attn_block_t block;
    attn_rows_t rows;

    clear_state(&state);
    clear_rows<D>(o);
    find_rows(&args, &share, units, &rows);
    if (find_block(&args, &share, split * OP_SPLIT + warp * ATTN_TOKENS,
                   &block))
    {
        attend_block<D, TYPE>(o, NULL, &state, (const uint32_t *) fragments,
                              &block, &rows);
    }

    state = chain_warps<D>(o_split, state_split, o, &state);
    put_split<D, TYPE>(&args, &share, o_split, &state, 0, split);
    put_split<D, TYPE>(&args, &share, o_split, &state, 1, split);
}


/* A warp: one KV head, 16 rows times heads of a tile, all splits.  Where
 * registers do not hold o of a split, it has places in shared memory (of the
 * smallest heads, since the compiler gives it fewer). */
template <int D, int TYPE>
static constexpr __host__ __device__ bool
in_places(void)
{
    return D < 64 || D > 128 || (TYPE == OP_Q8_0 && D > 64);
}


template <int D, int TYPE>
static constexpr __host__ __device__ int
many_warps(void)
{
    return D > 128 ? 1 : in_places<D, TYPE>() ? 2 : 4;
}


/* Of a warp: o of all splits, perhaps of one, and queries. */
template <int D, int TYPE>
static constexpr __host__ __device__ size_t
many_shared(void)
{
    return (size_t) (in_places<D, TYPE>() ? 2 : 1) * D / 8 * WARP_SIZE
               * sizeof(float4)
           + fragment_words<D>() * sizeof(uint32_t);
}


/* The splits' states and o to that of the lane's rows. */
template <int D, int TYPE>
static __device__ __forceinline__ attn_state_t
attend_splits(const attn_args_t *args, const share_t *share,
              const uint32_t *fragments, float4 *o_rows,
              const attn_rows_t *rows)
{
    const tile_t *tile = share->tile;
    const int last = (tile->pos + tile->n - 1) / OP_SPLIT;
    const bool shared = in_places<D, TYPE>();
    float4 *places = o_rows + D / 8 * WARP_SIZE;
    attn_state_t all;

    clear_state(&all);
    for (int split = first_split(args, tile->pos); split <= last; split++) {
        float o[D / 8][4];
        attn_state_t state;

        clear_state(&state);
        if (shared) {
            clear_places<D>(places);
        } else {
            clear_rows<D>(o);
        }
        for (int i = 0; i < OP_SPLIT; i += ATTN_TOKENS) {
            attn_block_t block;

            if (find_block(args, share, split * OP_SPLIT + i, &block)) {
                attend_block<D, TYPE>(shared ? NULL : o, places, &state,
                                      fragments, &block, rows);
            }
        }

        const attn_merge_t merge = merge_states(&all, &state);

#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            if (shared) {
                const float4 from = places[n * WARP_SIZE + lane_id()];

                o[n][0] = from.x;
                o[n][1] = from.y;
                o[n][2] = from.z;
                o[n][3] = from.w;
            }
            merge_place(o_rows + n * WARP_SIZE + lane_id(), &merge, o[n]);
        }
    }
    return all;
}


template <int D, int TYPE>
static __global__ void
__launch_bounds__(many_warps<D, TYPE>() * WARP_SIZE) many_kernel(attn_args_t args)
{
    DYN_SMEM(float4, shared);

    const int block_rows = many_warps<D, TYPE>() * ATTN_ROWS;
    const int shares = (args.group + block_rows - 1) / block_rows;
    const int per_tile = shares > 1 ? 1 : block_rows / args.group;
    const int warp = (int) threadIdx.x / WARP_SIZE;
    float4 *o_rows =
        shared + warp * (int) (many_shared<D, TYPE>() / sizeof(float4));
    uint32_t *fragments =
        (uint32_t *) (o_rows
                      + (in_places<D, TYPE>() ? 2 : 1) * D / 8 * WARP_SIZE);
    tile_t tile;

    if (!find_tile(&args, (int) blockIdx.y, per_tile, false, &tile)) {
        return;
    }

    const share_t share = { &tile, (int) blockIdx.x / shares,
                            (int) blockIdx.x % shares * block_rows
                                + warp * ATTN_ROWS };
    attn_rows_t rows;

    if (query_of(&args, &share, 0) < 0) {
        return;
    }

    /* the units are there for as long as o is not */
    put_queries<D, TYPE>(&args, &share, (uint16_t *) fragments,
                         (float *) o_rows, 0, ATTN_ROWS);
    __syncwarp();
    find_rows(&args, &share, (const float *) o_rows, &rows);
    __syncwarp();

    clear_places<D>(o_rows);

    const attn_state_t all =
        attend_splits<D, TYPE>(&args, &share, fragments, o_rows, &rows);

#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        const float4 o = o_rows[n * WARP_SIZE + lane_id()];

        if (rows.pos[0] >= 0) {
            put_out<D, TYPE>(&args, &share, 0, n, finished(o.x, all.sum[0]),
                             finished(o.y, all.sum[0]));
        }
        if (rows.pos[1] >= 0) {
            put_out<D, TYPE>(&args, &share, 1, n, finished(o.z, all.sum[1]),
                             finished(o.w, all.sum[1]));
        }
    }
}


/* A warp: one head of one row of a sequence of few rows, its splits
 * ascending. */
template <int D>
static __global__ void
__launch_bounds__(COMBINE_THREADS) combine_kernel(attn_args_t args)
{
    const int head = (int) blockIdx.x;
    const int seq = (int) blockIdx.y / args.few;
    const int index = (int) blockIdx.y % args.few;
    const int first = args.row_start[seq];
    const int n = args.row_start[seq + 1] - first;

    if (index >= n || n > args.few) {
        return;
    }

    const size_t row = (size_t) first + index;
    const int pos = args.pos[row];
    const int last = pos / OP_SPLIT;
    const int from = first_split(&args, pos);

    if (from == last) {
        return;
    }

    const float *part =
        args.parts
        + (((size_t) blockIdx.y * args.n_heads + head) * args.n_splits + from)
              * (PART_HEAD + D);
    float o[(D + 31) / 32] = {};
    float max = -INFINITY;
    float sum = 0.0f;

    for (int split = from; split <= last; split++, part += PART_HEAD + D) {
        float keep, take;

        attn_factors(&max, &sum, part[0], part[1], &keep, &take);

#pragma unroll
        for (int i = 0; i < (D + 31) / 32; i++) {
            const int d = lane_id() + 32 * i;

            if (d < D) {
                o[i] = fmaf(o[i], keep, part[PART_HEAD + d] * take);
            }
        }
    }

    float *to = args.out + (row * args.n_heads + head) * args.head_dim;

#pragma unroll
    for (int i = 0; i < (D + 31) / 32; i++) {
        const int d = lane_id() + 32 * i;

        if (d < args.head_dim) {
            to[d] = finished(o[i], sum);
        }
    }
}


/* --- launchers --- */

typedef struct {
    attn_args_t args;
    int n_rows;
    int max_seq_rows;
    cudaStream_t stream;
} attn_launch_t;


/* Most tiles of `per` rows that n_seqs sequences of n_rows rows fill. */
static int
most_tiles(const attn_launch_t *launch, int per)
{
    const int n_seqs = launch->args.n_seqs;

    return (launch->n_rows + n_seqs * (per - 1)) / per;
}


template <int D, int TYPE>
static void
launch_few(const attn_launch_t *launch)
{
    const attn_args_t args = launch->args;
    const int shares = (args.group + ATTN_ROWS - 1) / ATTN_ROWS;
    const int per = shares > 1 ? 1 : ATTN_ROWS / args.group;
    int tiles = args.n_seqs * ((args.few + per - 1) / per);

    tiles = tiles < most_tiles(launch, per) ? tiles : most_tiles(launch, per);

    const dim3 grid(args.n_kv_heads * shares, tiles, args.n_splits);
    const dim3 block(FEW_WARPS * WARP_SIZE);

    LAUNCH((few_kernel<D, TYPE>), grid, block, 0, launch->stream, args);

    if (args.n_splits > 1) {
        const dim3 rows(args.n_heads, args.n_seqs * args.few);
        const dim3 warp(COMBINE_THREADS);

        LAUNCH((combine_kernel<D>), rows, warp, 0, launch->stream, args);
    }
}


template <int D, int TYPE>
static void
launch_many(const attn_launch_t *launch)
{
    const attn_args_t args = launch->args;
    const int block_rows = many_warps<D, TYPE>() * ATTN_ROWS;
    const int shares = (args.group + block_rows - 1) / block_rows;
    const int per = shares > 1 ? 1 : block_rows / args.group;
    const dim3 grid(args.n_kv_heads * shares, most_tiles(launch, per));
    const dim3 block(many_warps<D, TYPE>() * WARP_SIZE);
    const size_t bytes = many_warps<D, TYPE>() * many_shared<D, TYPE>();

    cudaFuncSetAttribute(many_kernel<D, TYPE>,
                         cudaFuncAttributeMaxDynamicSharedMemorySize,
                         (int) bytes);
    LAUNCH((many_kernel<D, TYPE>), grid, block, bytes, launch->stream, args);
}


template <int D, int TYPE>
static void
launch_type(const attn_launch_t *launch)
{
    if (launch->args.few > 0
        && (launch->args.n_seqs > 1
            || launch->max_seq_rows <= launch->args.few))
    {
        launch_few<D, TYPE>(launch);
    }
    if (launch->max_seq_rows > launch->args.few) {
        launch_many<D, TYPE>(launch);
    }
}


template <int D>
static void
launch_dim(const attn_launch_t *launch, int dtype)
{
    if (dtype == OP_Q8_0) {
        launch_type<D, OP_Q8_0>(launch);
    } else {
        launch_type<D, OP_F16>(launch);
    }
}


int
cuda_attn_check(const op_limits_t *limits, op_err_t *err)
{
    if (limits->n_kv_heads <= 0 || limits->n_heads % limits->n_kv_heads != 0) {
        snprintf(err->text, sizeof(err->text),
                 "%d heads cannot share %d KV heads", limits->n_heads,
                 limits->n_kv_heads);
        return -1;
    }
    if (cuda_kv_dim(limits->head_dim) == 0) {
        snprintf(err->text, sizeof(err->text),
                 "heads of %d values: this device takes up to 256",
                 limits->head_dim);
        return -1;
    }
    return 0;
}


static size_t
part_bytes(int n_heads, int head_dim, int max_len)
{
    const size_t splits = ((size_t) max_len + OP_SPLIT - 1) / OP_SPLIT;

    return splits * n_heads * (PART_HEAD + cuda_kv_dim(head_dim))
           * sizeof(float);
}


/* Room for decode of all sequences, or for some to verify drafts; beyond it
 * rows go to the kernel that needs none. */
size_t
cuda_attn_scratch_bytes(const op_limits_t *limits)
{
    const size_t each =
        part_bytes(limits->n_heads, limits->head_dim, limits->max_len);
    size_t rows = (size_t) limits->max_seqs * FEW;

    if (limits->max_len <= OP_SPLIT) {
        return 0;
    }
    if (rows > 8 * FEW) {
        rows = limits->max_seqs > 8 * FEW ? limits->max_seqs : 8 * FEW;
    }
    if (rows > scratch_most / each) {
        rows = scratch_most / each;
    }
    return rows * each;
}


/* Rows that a sequence of few rows may have in this batch. */
static int
few_rows(const cuda_attn_call_t *call)
{
    const cuda_batch_t *batch = call->batch;
    size_t few = FEW;

    if (batch->max_len > OP_SPLIT) {
        few = call->scratch_bytes
              / part_bytes(call->attn->n_heads, call->attn->head_dim,
                           batch->max_len)
              / batch->n_seqs;
    }
    few = few < FEW ? few : (size_t) FEW;

    return (int) few < batch->max_seq_rows ? (int) few : batch->max_seq_rows;
}


void
cuda_attention_launch(const cuda_attn_call_t *call, float *out, const float *q)
{
    const cuda_batch_t *batch = call->batch;
    const op_attn_t *attn = call->attn;
    const op_kv_t *kv = call->kv;
    const cuda_kv_layout_t layout =
        cuda_kv_layout((int) kv->dtype, kv->n_kv_heads, kv->head_dim);
    attn_launch_t launch = {};
    attn_args_t *args = &launch.args;

    if (batch->n_rows == 0) {
        return;
    }

    launch.n_rows = batch->n_rows;
    launch.max_seq_rows = batch->max_seq_rows;
    launch.stream = call->stream;
    args->out = out;
    args->q = q;
    args->parts = (float *) call->scratch;
    args->pos = batch->pos;
    args->row_start = batch->row_start;
    args->tables = batch->tables;
    args->pages = (const uint8_t *) kv->base
                  + (size_t) call->layer * (size_t) kv->n_pages
                        * layout.page_bytes;
    args->page_bytes = layout.page_bytes;
    args->head_bytes = layout.head_bytes;
    args->n_seqs = batch->n_seqs;
    args->table_width = batch->table_width;
    args->n_heads = attn->n_heads;
    args->n_kv_heads = attn->n_kv_heads;
    args->head_dim = attn->head_dim;
    args->group = attn->n_heads / attn->n_kv_heads;
    args->few = few_rows(call);
    args->single = batch->max_seq_rows == 1 && batch->n_rows == batch->n_seqs;
    args->n_splits = (batch->max_len + OP_SPLIT - 1) / OP_SPLIT;
    args->window = call->window;
    args->scale = attn->scale;
    args->softcap = call->softcap;

    switch (layout.dim) {
    case 32:
        launch_dim<32>(&launch, (int) kv->dtype);
        break;
    case 64:
        launch_dim<64>(&launch, (int) kv->dtype);
        break;
    case 80:
        launch_dim<80>(&launch, (int) kv->dtype);
        break;
    case 96:
        launch_dim<96>(&launch, (int) kv->dtype);
        break;
    case 128:
        launch_dim<128>(&launch, (int) kv->dtype);
        break;
    default:
        launch_dim<256>(&launch, (int) kv->dtype);
        break;
    }
}

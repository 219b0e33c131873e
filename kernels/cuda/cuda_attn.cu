/*
 * Paged attention on the GPU: what is computed where.  The arithmetic is in
 * cuda_attn.cuh; nothing here changes a result.
 *
 * A tile is a few rows of one sequence, as many as fill the warps with the
 * query heads of one KV head.  Sequences of few rows, decode and verification,
 * get a block for each split of 256 tokens, whose warps have 64 tokens each;
 * what they found goes to scratch, and the block that is done last puts the
 * splits together.  Longer chunks have warps enough: there a warp has 16 rows
 * and all tokens that they see, split after split, and needs no scratch.
 */

#include "kernels/cuda/cuda_attn_tile.cuh"

#include <stdio.h>

enum { FEW = 8 }; /* rows that a sequence of few rows has at most */

static const size_t scratch_most = (size_t) 256 << 20;


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
        places[n * WARP_SIZE + lane_id()] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}


/* Row i of the share, its splits ascending. */
template <int D>
static __device__ __forceinline__ void
combine_row(const attn_args_t *args, const share_t *share, int i)
{
    const int query = query_of(args, share, i);
    const int pos = share->tile->pos + query;
    const int last = pos / OP_SPLIT;
    const int from = first_split(args, pos);

    if (query < 0 || from == last) {
        return;
    }

    const float *part = part_of<D>(args, share, i, from);
    float o[(D + 31) / 32] = {};
    float max = -INFINITY;
    float sum = 0.0f;

    for (int split = from; split <= last; split++, part += PART_HEAD + D) {
        float keep, take;

        attn_factors(&max, &sum, part[0], part[1], &keep, &take);

#pragma unroll
        for (int k = 0; k < (D + 31) / 32; k++) {
            const int d = lane_id() + 32 * k;

            if (d < D) {
                o[k] = fmaf(o[k], keep, part[PART_HEAD + d] * take);
            }
        }
    }

    const size_t row = share->tile->row + query;
    float *to =
        args->out
        + (row * args->n_heads + head_of(args, share, i)) * args->head_dim;

#pragma unroll
    for (int k = 0; k < (D + 31) / 32; k++) {
        const int d = lane_id() + 32 * k;

        if (d < args->head_dim) {
            to[d] = finished(o[k], sum);
        }
    }
}


/* A block: one KV head, 16 rows times heads of a tile, one split. */
template <int D, int TYPE>
static __global__ void
__launch_bounds__(FEW_WARPS *WARP_SIZE, 1) few_kernel(attn_args_t args)
{
    __shared__ uint4 fragments[fragment_words<D>() / 4];
    __shared__ float4 o_split[D / 8 * WARP_SIZE];
    __shared__ float4 state_split[WARP_SIZE];
    __shared__ float units[ATTN_ROWS];
    __shared__ tile_t kept;  /* over the products, where registers are few */
    __shared__ int n_splits; /* of the tile */

    const int shares = (args.group + ATTN_ROWS - 1) / ATTN_ROWS;
    const int per_tile = shares > 1 ? 1 : ATTN_ROWS / args.group;
    const int warp = (int) threadIdx.x / WARP_SIZE;
    const int split = (int) blockIdx.z;
    tile_t tile;

    if (!find_tile(&args, (int) blockIdx.y, per_tile, true, &tile)) {
        return;
    }

    const int from = first_split(&args, tile.pos);
    const int last = (tile.pos + tile.n - 1) / OP_SPLIT;

    if (split < from || split > last) {
        return;
    }

    const share_t share = { &tile, (int) blockIdx.x / shares,
                            (int) blockIdx.x % shares * ATTN_ROWS };

    put_queries<D, TYPE>(&args, &share, (uint16_t *) fragments, units,
                         warp * ATTN_ROWS / FEW_WARPS, ATTN_ROWS / FEW_WARPS);
    if (threadIdx.x == 0) {
        n_splits = last - from + 1;
        kept = tile;
    }
    __syncthreads();

    float o[D / 8][4];
    attn_state_t state;
    attn_block_t block;
    attn_rows_t rows;

    clear_state(&state);
    clear_rows<D>(o);
    find_rows(&args, &share, units, &rows);
    if (find_block(&args, &share, split * OP_SPLIT + warp * ATTN_TOKENS,
                   &block)) {
        attend_block<D, TYPE>(o, NULL, &state, (const uint32_t *) fragments,
                              &block, &rows);
    }

    state = chain_warps<D>(o_split, state_split, o, &state);

    const share_t whole = { &kept, share.kv_head, share.first };

    put_split<D, TYPE>(&args, &whole, o_split, &state, 0, split);
    put_split<D, TYPE>(&args, &whole, o_split, &state, 1, split);

    /* one alone has said all */
    if (n_splits == 1) {
        return;
    }

    unsigned *arrived = args.arrived + blockIdx.y * gridDim.x + blockIdx.x;

    if (last_block(arrived, (unsigned) n_splits)) {
        for (int i = warp; i < ATTN_ROWS; i += FEW_WARPS) {
            combine_row<D>(&args, &whole, i);
        }
    }
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
__launch_bounds__(many_warps<D, TYPE>() * WARP_SIZE, 1)
    many_kernel(attn_args_t args)
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
    __shared__ tile_t kept; /* as registers are few */
    tile_t tile;

    if (!find_tile(&args, (int) blockIdx.y, per_tile, false, &tile)) {
        return;
    }
    if (SHARED_MORE) {
        if (threadIdx.x == 0) {
            kept = tile;
        }
        __syncthreads();
    }

    const share_t share = { SHARED_MORE ? &kept : &tile,
                            (int) blockIdx.x / shares,
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

    static_assert(many_warps<D, TYPE>() * many_shared<D, TYPE>()
                      <= SHARED_LEAST,
                  "Turing, too");
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


/* One for each block of a split: tiles are no more than rows, and blocks of a
 * tile no more than heads. */
size_t
cuda_attn_arrived_bytes(const op_limits_t *limits)
{
    return limits->max_len <= OP_SPLIT
               ? 0
               : (size_t) limits->max_seqs * FEW * limits->n_heads
                     * sizeof(unsigned);
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
    args->arrived = call->arrived;
    args->pos = batch->pos;
    args->row_start = batch->row_start;
    args->tables = batch->tables;
    args->pages =
        (const uint8_t *) kv->base
        + (size_t) call->layer * (size_t) kv->n_pages * layout.page_bytes;
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

/*
 * The KV pool on the GPU: RoPE with the write of K and V, and copies of pages.
 *
 * A warp has one head of one row: its lanes take the values lane, lane + 32, …
 * and so have a block of q8_0 at a time.  The arithmetic is that of the CPU
 * backend, so is what a page holds, but for the layout (cuda_kv.h).
 */

#include "kernels/cuda/cuda_kv.h"

enum { WARPS = 4, PARTS = 8 /* of 32 values: head_dim ≤ 256 */ };
enum { COPY_THREADS = 256 };
enum { HALF_INFINITY = 0x7c00, HALF_NAN = 0x7e00 };

#define ROUND 12582912.0f /* 1.5 * 2^23: adding it rounds to even */
enum { ROUND_BITS = 0x4B400000 };

typedef struct {
    float *qkv;
    const float *cos_sin;
    const int32_t *pos;
    const int32_t *seq;
    const int32_t *tables;
    uint8_t *pages; /* of the layer */
    cuda_kv_layout_t layout;
    int table_width;
    int n_heads;
    int n_kv_heads;
    int head_dim;
    int rot;
    int mode;
} rope_args_t;

/* A head that is turned. */
typedef struct {
    const float *x;
    const float *cos_sin; /* of the row's position */
    int rot;
    int mode;
} turn_t;


/* The partner's sine has the sign in it, as on the CPU. */
static __device__ __forceinline__ float
turned(const turn_t *turn, int d)
{
    const int pairs = turn->rot / 2;
    int i, partner, second;

    if (d >= turn->rot) {
        return turn->x[d];
    }
    if (turn->mode == OP_ROPE_PAIRS) {
        i = d / 2;
        second = d % 2;
        partner = d ^ 1;
    } else {
        second = d >= pairs;
        i = d - second * pairs;
        partner = second ? i : i + pairs;
    }

    const float c = turn->cos_sin[2 * i];
    const float s = turn->cos_sin[2 * i + 1];

    return turn->x[d] * c + turn->x[partner] * (second ? s : -s);
}


/* A block of 32 under one scale, a value a lane. */
static __device__ __forceinline__ int
quantised(float x, uint16_t *scale)
{
    const int bits = __float_as_int(x) & 0x7fffffff;
    const bool bad = warp_any(bits >= 0x7f800000);
    const float top = warp_max(__int_as_float(bits));
    uint16_t half = f32_to_f16(top / 127.0f);
    const float d = f16_to_f32(half);

    if (bad || half >= HALF_INFINITY) {
        half = HALF_NAN;
    }
    *scale = half;
    if (half == 0 || half == HALF_NAN) {
        return 0;
    }

    float q = x / d;

    q = q < 127.0f ? q : 127.0f;
    q = q > -127.0f ? q : -127.0f;
    return __float_as_int(q + ROUND) - ROUND_BITS;
}


/* A head's K or V into its row of the record. */
static __device__ __forceinline__ void
store_row(const cuda_kv_layout_t *layout, uint8_t *record, int slot,
          const float *x, bool is_key)
{
    const int dim = layout->dim;
    uint8_t *row = record + (is_key ? layout->k : layout->v)
                   + (size_t) slot * dim * layout->size;
    uint16_t *scales =
        (uint16_t *) (record + (is_key ? layout->k_scales : layout->v_scales));

#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const int d = lane_id() + i * WARP_SIZE;

        if (i * WARP_SIZE >= dim) {
            break;
        }
        if (layout->size == 2) {
            if (d < dim) {
                ((uint16_t *) row)[d] = f32_to_f16(x[i]);
            }
            continue;
        }

        uint16_t scale;
        const int q = quantised(x[i], &scale);

        if (d < dim) {
            row[is_key ? cuda_kv_key_byte(d, dim)
                       : cuda_kv_value_byte(d, dim)] = (uint8_t) q;
        }
        if (lane_id() == 0) {
            scales[i * OP_PAGE + slot] = scale;
        }
    }
}


static __global__ void
__launch_bounds__(WARPS *WARP_SIZE) rope_kv_kernel(rope_args_t args)
{
    const int n_turned = args.n_heads + args.n_kv_heads;
    const int n_all = n_turned + args.n_kv_heads;
    const int head = (int) blockIdx.y * WARPS + (int) threadIdx.x / WARP_SIZE;
    const int row = (int) blockIdx.x;

    const int pos = args.pos[row];

    if (head >= n_all || pos < 0) {
        return;
    }

    float *to = args.qkv + ((size_t) row * n_all + head) * args.head_dim;
    const turn_t turn = { to, args.cos_sin + (size_t) pos * args.rot,
                          head < n_turned ? args.rot : 0, args.mode };
    float x[PARTS];

#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const int d = lane_id() + i * WARP_SIZE;

        x[i] = d < args.head_dim ? turned(&turn, d) : 0.0f;
    }

    __syncwarp(); /* all have read before any writes */

    if (head < n_turned && args.rot > 0) {
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            const int d = lane_id() + i * WARP_SIZE;

            if (d < args.rot) {
                to[d] = x[i];
            }
        }
    }
    if (head < args.n_heads) {
        return;
    }

    const bool is_key = head < n_turned;
    const int kv_head = head - (is_key ? args.n_heads : n_turned);
    const int page =
        args.tables[(size_t) args.seq[row] * args.table_width + pos / OP_PAGE];

    store_row(&args.layout,
              args.pages + (size_t) page * args.layout.page_bytes
                  + (size_t) kv_head * args.layout.head_bytes,
              pos % OP_PAGE, x, is_key);
}


/* A thread has 16 bytes of every page of a layer, and copies them from page to
 * page one after the other: the order of the list holds within each place, and
 * places have nothing to do with one another. */
static __global__ void
__launch_bounds__(COPY_THREADS)
    copy_kernel(uint8_t *base, size_t page_bytes, size_t layer_bytes,
                const op_copy_t *copies, int n)
{
    const size_t at =
        ((size_t) blockIdx.x * COPY_THREADS + threadIdx.x) * sizeof(uint4);
    uint8_t *pages = base + blockIdx.y * layer_bytes + at;

    if (at >= page_bytes) {
        return;
    }
    for (int i = 0; i < n; i++) {
        *(uint4 *) (pages + (size_t) copies[i].to * page_bytes) =
            *(const uint4 *) (pages + (size_t) copies[i].from * page_bytes);
    }
}


/* --- launchers --- */

size_t
cuda_kv_bytes(int dtype, int n_layers, int n_kv_heads, int head_dim)
{
    if ((dtype != OP_F16 && dtype != OP_Q8_0) || cuda_kv_dim(head_dim) == 0) {
        return 0;
    }

    return cuda_kv_layout(dtype, n_kv_heads, head_dim).page_bytes
           * (size_t) n_layers;
}


void
cuda_rope_kv_launch(const cuda_attn_call_t *call, float *qkv,
                    const float *cos_sin, int rot, int mode)
{
    const op_attn_t *attn = call->attn;
    const op_kv_t *kv = call->kv;
    const int n_all = attn->n_heads + 2 * attn->n_kv_heads;
    rope_args_t args = {};

    if (call->batch->n_rows == 0) {
        return;
    }

    args.qkv = qkv;
    args.cos_sin = cos_sin;
    args.pos = call->batch->pos;
    args.seq = call->batch->seq;
    args.tables = call->batch->tables;
    args.table_width = call->batch->table_width;
    args.layout = cuda_kv_layout((int) kv->dtype, kv->n_kv_heads, kv->head_dim);
    args.pages =
        (uint8_t *) kv->base
        + (size_t) call->layer * (size_t) kv->n_pages * args.layout.page_bytes;
    args.n_heads = attn->n_heads;
    args.n_kv_heads = attn->n_kv_heads;
    args.head_dim = attn->head_dim;
    args.rot = rot;
    args.mode = mode;

    const dim3 grid(call->batch->n_rows, (n_all + WARPS - 1) / WARPS);
    const dim3 block(WARPS * WARP_SIZE);

    LAUNCH(rope_kv_kernel, grid, block, 0, call->stream, args);
}


void
cuda_kv_copy_launch(const op_kv_t *kv, const op_copy_t *copies, int n,
                    cudaStream_t stream)
{
    const size_t bytes =
        cuda_kv_layout((int) kv->dtype, kv->n_kv_heads, kv->head_dim)
            .page_bytes;
    const size_t each = COPY_THREADS * sizeof(uint4);
    const dim3 grid((unsigned) ((bytes + each - 1) / each), kv->n_layers);
    const dim3 block(COPY_THREADS);

    if (n > 0) {
        LAUNCH(copy_kernel, grid, block, 0, stream, (uint8_t *) kv->base, bytes,
               bytes * (size_t) kv->n_pages, copies, n);
    }
}

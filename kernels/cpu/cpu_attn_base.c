/*
 * The attention kernels in portable C: any processor, and the plainest form
 * of the order that cpu_attn.h fixes.
 */

#include <math.h>

#include "kernels/cpu/cpu_attn.h"
#include "kernels/cpu/cpu_math.h"
#include "kernels/op/tensor.h"


static void
base_scores_wide(float *s, const float *q, int rows, const float *k,
                 int n_pages, int head_dim)
{
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < n_pages * OP_PAGE; i++) {
            const float *key =
                k + (size_t) (i / OP_PAGE) * OP_PAGE * head_dim + i % OP_PAGE;
            float acc = 0.0f;

            for (int d = 0; d < head_dim; d++) {
                acc = fmaf(q[(size_t) r * head_dim + d], key[d * OP_PAGE], acc);
            }
            s[(size_t) r * OP_SPLIT + i] = acc;
        }
    }
}


static void
base_softmax(float *s, int n, float *ml)
{
    float max = s[0];
    float sum[OP_PAGE] = { 0.0f };

    for (int t = 1; t < n; t++) {
        max = s[t] > max ? s[t] : max;
    }
    for (int t = 0; t < n; t++) {
        s[t] = cpu_exp_neg(s[t] - max);
        sum[t % OP_PAGE] += s[t];
    }
    for (int half = OP_PAGE / 2; half > 0; half /= 2) {
        for (int j = 0; j < half; j++) {
            sum[j] += sum[j + half];
        }
    }

    ml[0] = max;
    ml[1] = sum[0];
}


static void
base_values_wide(float *o, int ldo, const float *s, int rows, const float *v,
                 int n, int dim)
{
    for (int r = 0; r < rows; r++) {
        for (int t = 0; t < n; t++) {
            for (int d = 0; d < dim; d++) {
                o[(size_t) r * ldo + d] =
                    fmaf(s[(size_t) r * OP_SPLIT + t], v[(size_t) t * dim + d],
                         o[(size_t) r * ldo + d]);
            }
        }
    }
}


static void
widen_halves(float *out, const uint16_t *in, int n)
{
    for (int i = 0; i < n; i++) {
        out[i] = op_half_to_float(in[i]);
    }
}


static void
base_widen_keys(const cpu_attn_split_t *split, float *out, int page)
{
    const cpu_kv_layout_t *at = &split->layout;
    const int n = OP_PAGE * split->head_dim;

    if (at->dtype == OP_F16) {
        widen_halves(out, cpu_attn_halves(split, page, at->k), n);
        return;
    }

    const int8_t *key = (const int8_t *) split->page[page] + at->k;
    const uint16_t *scale = cpu_attn_halves(split, page, at->k_scales);
    float d[OP_PAGE];

    for (int i = 0; i < n; i++) {
        if (i % (OP_PAGE * OP_KV_BLOCK) == 0) {
            widen_halves(d, scale, OP_PAGE);
            scale += OP_PAGE;
        }
        out[i] = (float) key[i] * d[i % OP_PAGE];
    }
}


static void
base_widen_values(const cpu_attn_split_t *split, float *out, int ld, int page,
                  int n)
{
    const cpu_kv_layout_t *at = &split->layout;
    const int head_dim = split->head_dim;

    for (int t = 0; t < n; t++, out += ld) {
        if (at->dtype == OP_F16) {
            widen_halves(out,
                         cpu_attn_halves(split, page, at->v) + t * head_dim,
                         head_dim);
            continue;
        }

        const int8_t *value =
            (const int8_t *) split->page[page] + at->v + t * head_dim;
        const uint16_t *scale = cpu_attn_halves(split, page, at->v_scales);

        for (int b = 0; b < head_dim; b += OP_KV_BLOCK) {
            const float d =
                op_half_to_float(scale[b / OP_KV_BLOCK * OP_PAGE + t]);

            for (int i = b; i < b + OP_KV_BLOCK && i < head_dim; i++) {
                out[i] = (float) value[i] * d;
            }
        }
    }
}


static void
base_combine(float *y, const float *parts, int n, size_t stride, int head_dim,
             float sum)
{
    for (int d = 0; d < head_dim; d++) {
        float acc = 0.0f;

        for (int i = 0; i < n; i++) {
            const float *part = parts + i * stride;

            acc = fmaf(part[2], part[CPU_ATTN_HEAD + d], acc);
        }
        y[d] = acc / sum;
    }
}


/* Converting costs as much as an fma, so pages are always widened and the
 * kernels that read them as they are are not needed. */
const cpu_attn_kernels_t cpu_attn_baseline = {
    .scores_wide = base_scores_wide,
    .softmax = base_softmax,
    .values_wide = base_values_wide,
    .widen_keys = base_widen_keys,
    .widen_values = base_widen_values,
    .combine = base_combine,
    .direct_rows = 0,
};

/*
 * The llama architecture (Llama 1 to 3, SmolLM, Mistral): weight names of the
 * GGUF format, and the forward pass over ops.
 *
 * Pre-norm blocks: x += Wo attention(rope(Wqkv norm(x))), then x += Wdown
 * (silu(Wgate h) * Wup h) with h = norm(x).  GGUF's converter has permuted the
 * rows of q and k, so RoPE rotates neighbours (OP_ROPE_PAIRS).
 */

#include "engine/model/arch.h"

#include <math.h>
#include <stdio.h>


/* A part by its name in layer l; l < 0: not in a layer. */
static weights_part_t
part(int l, const char *name, int64_t n_out)
{
    weights_part_t p;

    p.n_out = n_out;
    if (l < 0) {
        snprintf(p.name, sizeof(p.name), "%s.weight", name);
    } else {
        snprintf(p.name, sizeof(p.name), "blk.%d.%s.weight", l, name);
    }

    return p;
}


static int
bind_layer(model_t *model, weights_t *w, int l)
{
    const model_config_t *c = &model->config;
    model_layer_t *layer = &model->layers[l];
    const int64_t n_q = (int64_t) c->n_heads * c->head_dim;
    const int64_t n_kv = (int64_t) c->n_kv_heads * c->head_dim;

    const weights_part_t qkv[] = { part(l, "attn_q", n_q),
                                   part(l, "attn_k", n_kv),
                                   part(l, "attn_v", n_kv) };
    const weights_part_t o = part(l, "attn_output", c->n_embd);
    const weights_part_t gate_up[] = { part(l, "ffn_gate", c->n_ff),
                                       part(l, "ffn_up", c->n_ff) };
    const weights_part_t down = part(l, "ffn_down", c->n_embd);
    const weights_part_t attn_norm = part(l, "attn_norm", 1);
    const weights_part_t ffn_norm = part(l, "ffn_norm", 1);

    layer->attn_norm = model->norms.data + (size_t) (2 * l) * c->n_embd;
    layer->ffn_norm = layer->attn_norm + c->n_embd;

    int rc = weights_vector(w, attn_norm.name, c->n_embd, layer->attn_norm);

    if (rc == LLM_OK) {
        rc = weights_vector(w, ffn_norm.name, c->n_embd, layer->ffn_norm);
    }
    if (rc == LLM_OK) {
        rc = weights_matrix(w, qkv, 3, c->n_embd, &layer->qkv);
    }
    if (rc == LLM_OK) {
        rc = weights_matrix(w, &o, 1, n_q, &layer->attn_o);
    }
    if (rc == LLM_OK) {
        rc = weights_matrix(w, gate_up, 2, c->n_embd, &layer->gate_up);
    }
    if (rc == LLM_OK) {
        rc = weights_matrix(w, &down, 1, c->n_ff, &layer->down);
    }

    return rc;
}


/* Llama 3 stores what its long-context RoPE divides each frequency by. */
static int
bind_rope(model_t *model, weights_t *w)
{
    const weights_part_t p = part(-1, "rope_freqs", 1);
    const int n = model->config.rot_dim / 2;

    if (!weights_has(w, p.name)) {
        return LLM_OK;
    }

    float *factors = arena_calloc(model->arena, (size_t) n * sizeof(float));

    if (factors == NULL) {
        return llm_err_set(w->err, LLM_NOMEM, NULL,
                           "no memory to load the model");
    }

    const int rc = weights_vector(w, p.name, n, factors);

    for (int i = 0; rc == LLM_OK && i < n; i++) {
        if (!isfinite(factors[i]) || factors[i] <= 0) {
            return gguf_err(w->gguf, w->err,
                            "tensor \"%s\" holds %g, which cannot divide a "
                            "frequency",
                            p.name, (double) factors[i]);
        }
    }

    model->rope_factors = factors;

    return rc;
}


static int
llama_bind(model_t *model, weights_t *w)
{
    const model_config_t *c = &model->config;
    const weights_part_t embed = part(-1, "token_embd", c->n_vocab);
    const weights_part_t head = part(-1, "output", c->n_vocab);
    const weights_part_t norm = part(-1, "output_norm", 1);
    int rc = weights_matrix(w, &embed, 1, c->n_embd, &model->embed);

    for (int l = 0; rc == LLM_OK && l < c->n_layers; l++) {
        rc = bind_layer(model, w, l);
    }

    if (rc == LLM_OK) {
        model->out_norm =
            model->norms.data + (size_t) (2 * c->n_layers) * c->n_embd;
        rc = weights_vector(w, norm.name, c->n_embd, model->out_norm);
    }

    if (rc == LLM_OK && weights_has(w, head.name)) {
        rc = weights_matrix(w, &head, 1, c->n_embd, &model->head);
    } else if (rc == LLM_OK) {
        model->head = model->embed;
    }

    if (rc == LLM_OK) {
        rc = bind_rope(model, w);
    }

    return rc;
}


/* The gated MLP: x += Wdown (silu(gate) * up). */
static void
mlp(model_t *model, const model_layer_t *layer, float *x, int rows)
{
    const model_config_t *c = &model->config;
    const op_table_t *ops = model->ops;
    op_dev_t *dev = model->dev;

    ops->rmsnorm(dev, model->h.data, x, layer->ffn_norm, rows, c->n_embd,
                 c->rms_eps);
    ops->linear(dev, model->gate_up.data, 2 * c->n_ff, model->h.data, rows,
                layer->gate_up, OP_SET);
    ops->silu_mul(dev, model->act.data, model->gate_up.data, rows, c->n_ff);
    ops->linear(dev, x, c->n_embd, model->act.data, rows, layer->down, OP_ADD);
}


static void
llama_forward(model_t *model, const op_batch_t *batch, const op_kv_t *kv)
{
    const model_config_t *c = &model->config;
    const op_table_t *ops = model->ops;
    op_dev_t *dev = model->dev;
    const op_attn_t attn = { c->n_heads, c->n_kv_heads, c->head_dim,
                             (float) (1.0 / sqrt(c->head_dim)) };
    const int n_q = c->n_heads * c->head_dim;
    const int n_qkv = (c->n_heads + 2 * c->n_kv_heads) * c->head_dim;

    float *x = model->x.data;
    const float *mixed = model->attn.data;
    int rows = batch->n_rows;

    ops->embed(dev, x, model->embed, batch->tokens, rows);

    for (int l = 0; l < c->n_layers; l++) {
        const model_layer_t *layer = &model->layers[l];

        ops->rmsnorm(dev, model->h.data, x, layer->attn_norm, rows, c->n_embd,
                     c->rms_eps);

        /* Norm weights let a few channels stand out here, and what rounding
         * takes from their neighbours moves attention more than anything
         * else: measured, OP_FINE in this product alone takes a quarter off
         * the error of the log-probabilities. */
        ops->linear(dev, model->qkv.data, n_qkv, model->h.data, rows,
                    layer->qkv, OP_SET | OP_FINE);
        ops->rope_kv(dev, model->qkv.data, batch, &attn, model->cos_sin.data,
                     c->rot_dim, model->arch->rope_mode, kv, l);

        if (l == c->n_layers - 1 && batch->n_out == 0) {
            return;
        }

        ops->attention(dev, model->attn.data, model->qkv.data, batch, &attn, kv,
                       l);

        /* Behind the last attention only the out rows matter; rows do not
         * see one another there, so leaving out the others changes no bit.
         * The buffer of q, k and v is free by now. */
        if (l == c->n_layers - 1) {
            rows = batch->n_out;
            ops->gather(dev, model->qkv.data, mixed, batch->out_rows, rows,
                        n_q);
            ops->gather(dev, model->out.data, x, batch->out_rows, rows,
                        c->n_embd);
            mixed = model->qkv.data;
            x = model->out.data;
        }

        ops->linear(dev, x, c->n_embd, mixed, rows, layer->attn_o, OP_ADD);
        mlp(model, layer, x, rows);
    }

    ops->rmsnorm(dev, x, x, model->out_norm, rows, c->n_embd, c->rms_eps);
}


const arch_t arch_llama = {
    .name = "llama",
    .rope_mode = OP_ROPE_PAIRS,
    .bind = llama_bind,
    .forward = llama_forward,
};

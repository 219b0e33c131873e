/*
 * The tensor table of a GGUF file: names, shapes, types and places.
 *
 * Called by gguf.c while it parses.  Shapes are bounded before they are
 * multiplied, and every tensor's data is known to lie inside the file before
 * anybody sees a pointer to it.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model/gguf_file.h"

/* Types of the format that this project does not read, for the message. */
static const char *
foreign_type(uint32_t type)
{
    static const char *const names[] = {
        [9] = "Q8_1",     [10] = "Q2_K",   [11] = "Q3_K",    [15] = "Q8_K",
        [16] = "IQ2_XXS", [17] = "IQ2_XS", [18] = "IQ3_XXS", [19] = "IQ1_S",
        [20] = "IQ4_NL",  [21] = "IQ3_S",  [22] = "IQ2_S",   [23] = "IQ4_XS",
        [24] = "I8",      [25] = "I16",    [26] = "I32",     [27] = "I64",
        [28] = "F64",     [29] = "IQ1_M",  [34] = "TQ1_0",   [35] = "TQ2_0",
        [39] = "MXFP4",
    };

    if (type >= sizeof(names) / sizeof(names[0]) || names[type] == NULL) {
        return "unknown";
    }

    return names[type];
}


static int
unsupported_type(gguf_cursor_t *c, const gguf_info_t *info, uint32_t type)
{
    char known[160];
    size_t at = 0;

    known[0] = '\0';
    for (int t = 0; t < 64; t++) {
        const char *name = op_dtype_name(t);

        if (name != NULL && at + strlen(name) + 2 < sizeof(known)) {
            at += (size_t) snprintf(known + at, sizeof(known) - at, "%s%s",
                                    at ? ", " : "", name);
        }
    }

    return gguf_err(c->gguf, c->err,
                    "tensor \"%s\" has type %s (%u), which is "
                    "not supported; supported: %s",
                    gguf_show(info->name).text, foreign_type(type), type,
                    known);
}


/* The shape and the bytes it needs; nothing here can overflow. */
static int
take_shape(gguf_cursor_t *c, gguf_info_t *info)
{
    uint64_t *ne = info->ne;
    int64_t n_out = 1;

    if (!gguf_take_u32(c, &info->n_dims)) {
        return gguf_cut_short(c, "the tensor table");
    }

    if (info->n_dims < 1 || info->n_dims > GGUF_MAX_DIMS) {
        return gguf_err(c->gguf, c->err,
                        "tensor \"%s\" has %u dimensions; 1 to "
                        "%d are allowed",
                        gguf_show(info->name).text, info->n_dims,
                        GGUF_MAX_DIMS);
    }

    for (uint32_t i = 0; i < info->n_dims; i++) {
        if (!gguf_take_u64(c, &ne[i])) {
            return gguf_cut_short(c, "the tensor table");
        }

        if (ne[i] < 1 || ne[i] > INT32_MAX
            || (i > 0 && (n_out *= (int64_t) ne[i]) > INT32_MAX))
        {
            return gguf_err(c->gguf, c->err,
                            "tensor \"%s\" has an impossible "
                            "size: dimension %u is %llu",
                            gguf_show(info->name).text, i,
                            (unsigned long long) ne[i]);
        }
    }

    info->tensor.n_in = (int64_t) ne[0];
    info->tensor.n_out = n_out;

    return LLM_OK;
}


static int
take_info(gguf_cursor_t *c, gguf_info_t *info, uint32_t i)
{
    uint32_t type;
    int rc = gguf_take_name(c, &info->name, "tensor", i);

    if (rc == LLM_OK) {
        rc = take_shape(c, info);
    }
    if (rc != LLM_OK) {
        return rc;
    }

    if (!gguf_take_u32(c, &type) || !gguf_take_u64(c, &info->offset)) {
        return gguf_cut_short(c, "the tensor table");
    }

    const int block = type <= INT32_MAX ? op_dtype_block((int) type) : 0;

    if (block == 0) {
        return unsupported_type(c, info, type);
    }

    op_tensor_t *tensor = &info->tensor;

    tensor->dtype = (op_dtype_t) type;
    if (tensor->n_in % block != 0) {
        return gguf_err(c->gguf, c->err,
                        "tensor \"%s\" of type %s has rows of "
                        "%lld values, not a multiple of %d",
                        gguf_show(info->name).text, op_dtype_name((int) type),
                        (long long) tensor->n_in, block);
    }

    /* below 2^31 values a row, so a row is below 2^34 bytes, and below 2^31
     * rows: the product could leave 64 bits */
    if (__builtin_mul_overflow(
            (uint64_t) op_row_bytes((int) type, tensor->n_in),
            (uint64_t) tensor->n_out, &info->bytes))
    {
        info->bytes = UINT64_MAX;
    }

    return LLM_OK;
}


int
gguf_take_infos(gguf_cursor_t *c)
{
    gguf_t *gguf = c->gguf;

    for (uint32_t i = 0; i < gguf->n_infos; i++) {
        gguf_info_t *info = &gguf->infos[i];
        const int rc = take_info(c, info, i);

        if (rc != LLM_OK) {
            return rc;
        }

        uint32_t *slot = gguf_names_slot(&gguf->info_names, info->name,
                                         gguf_info_name, gguf->infos);
        if (*slot != 0) {
            return gguf_err(gguf, c->err, "tensor \"%s\" is there twice",
                            gguf_show(info->name).text);
        }
        *slot = i + 1;
    }

    return LLM_OK;
}


static int
by_offset(const void *a, const void *b)
{
    const gguf_info_t *x = *(const gguf_info_t *const *) a;
    const gguf_info_t *y = *(const gguf_info_t *const *) b;

    return x->offset < y->offset ? -1 : x->offset > y->offset;
}


/* Every tensor lies inside the file, and no two overlap: so what a loader
 * allocates is bounded by the size of the file. */
int
gguf_place_tensors(gguf_cursor_t *c)
{
    gguf_t *gguf = c->gguf;
    const size_t head = (size_t) (c->p - gguf->data);
    const size_t pad =
        (gguf->alignment - head % gguf->alignment) % gguf->alignment;

    const gguf_info_t **order =
        arena_calloc(gguf->arena, (gguf->n_infos + 1) * sizeof(*order));

    if (order == NULL) {
        return gguf_no_memory(c);
    }

    if (gguf->n_infos > 0 && gguf_take(c, pad) == NULL) {
        return gguf_cut_short(c, "the padding before the tensor data");
    }

    for (uint32_t i = 0; i < gguf->n_infos; i++) {
        gguf_info_t *info = &gguf->infos[i];

        if (info->offset % gguf->alignment != 0) {
            return gguf_err(gguf, c->err,
                            "tensor \"%s\" is at offset %llu, not "
                            "a multiple of the alignment %u",
                            gguf_show(info->name).text,
                            (unsigned long long) info->offset, gguf->alignment);
        }

        if (info->bytes > c->left || info->offset > c->left - info->bytes) {
            return gguf_err(gguf, c->err,
                            "the data of tensor \"%s\" reaches "
                            "past the end of the file (%zu bytes); is it "
                            "complete?",
                            gguf_show(info->name).text, gguf->len);
        }

        info->tensor.data = c->p + info->offset;
        gguf->tensor_bytes += info->bytes;
        order[i] = info;
    }

    qsort(order, gguf->n_infos, sizeof(*order), by_offset);

    for (uint32_t i = 1; i < gguf->n_infos; i++) {
        if (order[i - 1]->offset + order[i - 1]->bytes > order[i]->offset) {
            return gguf_err(gguf, c->err,
                            "the data of tensors \"%s\" and "
                            "\"%s\" overlap",
                            gguf_show(order[i - 1]->name).text,
                            gguf_show(order[i]->name).text);
        }
    }

    return LLM_OK;
}

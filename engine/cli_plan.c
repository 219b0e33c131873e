/*
 * llm-engine plan: prints where the memory of a machine would go, how many
 * requests it would hold, and how fast it could decode at best.
 *
 * The arithmetic is sizing.c's and, for the pages, the very function that an
 * engine sizes its cache with.  Of a model file only the header is read.
 */

#include "engine/cli_plan.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "engine/budget.h"
#include "engine/cli_tool.h"
#include "engine/conf.h"
#include "engine/kv/memory.h"
#include "engine/kv/store.h"
#include "engine/kv/table.h"
#include "engine/sizing.h"

enum { LOGIT_ROWS = 64, DTYPES = 64, LEN_MAX = 1 << 24 };

typedef struct {
    const char *model; /* a GGUF file */
    const char *like;  /* or a name of the table */
    int dtype;         /* -1: the file's own */
    int kv_dtype;
    size_t memory; /* 0: this machine's */
    double utilization;
    double bandwidth; /* GB/s; 0: not given */
    int context;      /* 0: what the model was trained for, or what fits */
    int mean;         /* 0: a quarter of the context */
    int rows;
    int seqs;
} plan_args_t;

/* The model, and what its weights take. */
typedef struct {
    model_config_t config; /* of a file */
    sizing_shape_t shape;
    const char *dtype;
    size_t weights;
    size_t step_weights;
} plan_model_t;


static int
parse_int(const char *name, const char *value, int *out)
{
    char *end;
    const long n = strtol(value, &end, 10);

    if (end == value || *end != '\0' || n < 1 || n > LEN_MAX) {
        return cli_complain(name, value, "a number from 1 to 16777216");
    }

    *out = (int) n;

    return LLM_OK;
}


static int
parse_real(const char *name, const char *value, double *out)
{
    char *end;

    *out = strtod(value, &end);

    if (end == value || *end != '\0' || !isfinite(*out) || *out <= 0) {
        return cli_complain(name, value, "a number above 0");
    }

    return LLM_OK;
}


/* "40G" is 40 × 2^30 as in the configuration; "40GB" 40 × 10^9, as cards are
 * sold. */
static int
parse_bytes(const char *name, const char *value, size_t *out)
{
    static const struct {
        const char *unit;
        double factor;
    } units[] = {
        { "", 1 },          { "k", 1024 },         { "kb", 1e3 },
        { "m", 1048576 },   { "mb", 1e6 },         { "g", 1073741824 },
        { "gb", 1e9 },      { "t", 0x1p40 },       { "tb", 1e12 },
        { "mib", 1048576 }, { "gib", 1073741824 },
    };
    char *end;
    const double n = strtod(value, &end);

    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
        const double bytes = n * units[i].factor;

        if (end != value && strcasecmp(end, units[i].unit) == 0 && bytes >= 1
            && bytes < 0x1p53)
        {
            *out = (size_t) bytes;
            return LLM_OK;
        }
    }

    return cli_complain(name, value, "a size such as 40G (GiB) or 40GB");
}


static int
parse_dtype(const char *name, const char *value, int *out)
{
    for (int i = 0; i < DTYPES; i++) {
        const char *known = op_dtype_name(i);

        if (known != NULL && strcasecmp(known, value) == 0) {
            *out = i;
            return LLM_OK;
        }
    }

    return cli_complain(
        name, value,
        "f32, f16, bf16, q8_0, q6_k, q5_k, q5_1, q5_0, q4_k, q4_1 "
        "or q4_0");
}


/* Those that an engine's cache can have. */
static int
parse_kv_dtype(const char *name, const char *value, int *out)
{
    if (strcmp(value, "f16") == 0) {
        *out = OP_F16;

    } else if (strcmp(value, "q8_0") == 0) {
        *out = OP_Q8_0;

    } else {
        return cli_complain(name, value, "f16 or q8_0");
    }

    return LLM_OK;
}


static int
parse_option(plan_args_t *args, const char *name, const char *value)
{
    const struct {
        const char *name;
        int *number;
        double *real;
        const char **text;
    } rows[] = {
        { "model", NULL, NULL, &args->model },
        { "like", NULL, NULL, &args->like },
        { "utilization", NULL, &args->utilization, NULL },
        { "bandwidth", NULL, &args->bandwidth, NULL },
        { "context", &args->context, NULL, NULL },
        { "mean-tokens", &args->mean, NULL, NULL },
        { "max-num-batched-tokens", &args->rows, NULL, NULL },
        { "max-num-seqs", &args->seqs, NULL, NULL },
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (strcmp(name, rows[i].name) != 0) {
            continue;
        }

        if (rows[i].text != NULL) {
            *rows[i].text = value;
            return LLM_OK;
        }

        return rows[i].real != NULL ? parse_real(name, value, rows[i].real)
                                    : parse_int(name, value, rows[i].number);
    }

    if (strcmp(name, "memory") == 0) {
        return parse_bytes(name, value, &args->memory);
    }

    if (strcmp(name, "dtype") == 0) {
        return parse_dtype(name, value, &args->dtype);
    }

    if (strcmp(name, "kv-cache-dtype") == 0) {
        return parse_kv_dtype(name, value, &args->kv_dtype);
    }

    return cli_complain(name, value, "an option that plan has (see --help)");
}


static int
parse_args(plan_args_t *args, int argc, char **argv)
{
    for (int i = 1; i < argc; i += 2) {
        if (strncmp(argv[i], "--", 2) != 0 || i + 1 >= argc) {
            fprintf(stderr, "llm-engine: \"%s\" needs the form --name value\n",
                    argv[i]);
            return LLM_BADREQ;
        }

        const int rc = parse_option(args, argv[i] + 2, argv[i + 1]);

        if (rc != LLM_OK) {
            return rc;
        }
    }

    if (args->utilization < 0.05 || args->utilization > 1) {
        fprintf(stderr,
                "llm-engine: --utilization %g: use a number from 0.05 "
                "to 1\n",
                args->utilization);
        return LLM_BADREQ;
    }

    if ((args->model == NULL) == (args->like == NULL)) {
        fprintf(stderr, "llm-engine: plan needs either --model FILE or --like "
                        "NAME\n");
        return LLM_BADREQ;
    }

    return LLM_OK;
}


static int
model_like(const plan_args_t *args, plan_model_t *model)
{
    const sizing_shape_t *shape = sizing_find(args->like);
    const int dtype = args->dtype >= 0 ? args->dtype : OP_F16;

    if (shape == NULL) {
        fprintf(stderr, "llm-engine: --like %s: use one of", args->like);

        for (int i = 0; sizing_at(i) != NULL; i++) {
            fprintf(stderr, " %s", sizing_at(i)->name);
        }

        fputc('\n', stderr);
        return LLM_BADREQ;
    }

    model->shape = *shape;
    model->dtype = op_dtype_name(dtype);
    model->weights = sizing_weight_bytes(shape, (op_dtype_t) dtype);
    model->step_weights = sizing_step_bytes(shape, (op_dtype_t) dtype);

    return LLM_OK;
}


static int
model_file(const plan_args_t *args, plan_model_t *model)
{
    gguf_t *gguf = NULL;
    op_tensor_t embed;
    llm_err_t err;

    int rc = gguf_open(args->model, &gguf, &err);

    if (rc == LLM_OK) {
        rc = model_config_read(gguf, &model->config, &err);
    }

    if (rc == LLM_OK && !gguf_tensor(gguf, "token_embd.weight", &embed)) {
        rc = gguf_err(gguf, &err, "tensor \"token_embd.weight\" is missing");
    }

    if (rc != LLM_OK) {
        fprintf(stderr, "llm-engine: %s\n", err.text);
        gguf_close(gguf);
        return rc;
    }

    const bool tied = gguf_tensor_index(gguf, "output.weight") < 0;

    model->shape = sizing_shape(&model->config, tied);

    if (args->dtype >= 0) {
        const op_dtype_t dtype = (op_dtype_t) args->dtype;

        model->dtype = op_dtype_name(args->dtype);
        model->weights = sizing_weight_bytes(&model->shape, dtype);
        model->step_weights = sizing_step_bytes(&model->shape, dtype);

    } else {
        model->dtype = "the file's types";
        model->weights = budget_weight_bytes(gguf);
        model->step_weights =
            model->weights
            - (tied
                   ? 0
                   : sizing_matrix_bytes(embed.dtype, embed.n_in, embed.n_out));
    }

    gguf_close(gguf);

    return LLM_OK;
}


static void
print_bytes(const char *what, size_t bytes, size_t of)
{
    printf("%-13s %8.2f GB  %8.2f GiB  %5.1f %%\n", what, (double) bytes / 1e9,
           (double) bytes / 1073741824.0, 100.0 * (double) bytes / (double) of);
}


static void
print_requests(const sizing_load_t *load, const sizing_plan_t *plan)
{
    printf("\nrequests of up to %d tokens at once, if they reach %d in the "
           "mean:\n",
           load->context, load->mean);
    printf("  reserved    %6lld  the maximum set aside for each: %.1f %% stays "
           "empty\n",
           (long long) plan->reserved, 100 * plan->reserved_waste);
    printf(
        "  paged       %6lld  pages taken when needed: %.1f %% stays empty\n",
        (long long) plan->paged, 100 * plan->paged_waste);

    if (plan->batch < plan->paged) {
        printf("  max_num_seqs lets %d of them into one step\n",
               load->max_seqs);
    }

    if (load->bytes_per_sec <= 0) {
        return;
    }

    printf("\ndecode at %g GB/s, at best:\n", load->bytes_per_sec / 1e9);
    printf("  %6d request   %10.1f tok/s\n", 1, plan->single_per_sec);

    if (plan->batch > 1) {
        printf("  %6lld requests  %10.1f tok/s, %.1f ms a step\n",
               (long long) plan->batch, plan->batch_per_sec,
               1e3 * plan->batch_step_secs);
    }
}


static int
print_plan(const plan_args_t *args, const plan_model_t *model)
{
    const sizing_shape_t *shape = &model->shape;
    const int context = args->context > 0 ? args->context : shape->n_ctx;
    const size_t kv_token = sizing_kv_bytes(shape, (op_dtype_t) args->kv_dtype);
    const sizing_step_t step = {
        .max_rows = args->rows,
        .max_out = args->seqs < LOGIT_ROWS ? args->seqs : LOGIT_ROWS,
        .max_len = context,
        .samplers = 1, /* one for each thread of a machine that is not here */
    };
    const size_t activations = sizing_activation_bytes(shape, &step);
    const kv_ask_t ask = {
        .page_bytes = KV_PAGE * kv_token,
        .total = args->memory,
        .record_bytes = budget_record_bytes(true),
        .held = model->weights + activations
                + budget_step_bytes(&step, args->seqs, shape->n_vocab),
        .free = SIZE_MAX,
        .utilization = args->utilization,
        .max_seqs = args->seqs,
        .max_len = context,
        .auto_len = args->context == 0,
    };
    kv_size_t size;
    llm_err_t err;

    printf("%s: %.2f billion parameters, weights %s\n\n", shape->name,
           (double) sizing_params(shape) / 1e9, model->dtype);
    print_bytes("memory", args->memory, args->memory);
    print_bytes("may be used", kv_store_requested(ask.total, ask.utilization),
                args->memory);
    print_bytes("weights", model->weights, args->memory);
    print_bytes("activations", activations, args->memory);

    if (kv_store_size(&ask, &size, &err) != LLM_OK) {
        fflush(stdout);
        fprintf(stderr, "llm-engine: %s\n", err.text);
        return 1;
    }

    print_bytes("KV cache", (size_t) size.n_pages * ask.page_bytes,
                args->memory);
    printf("\nKV (%s): %.1f KiB per token, %.2f MiB per page of %d tokens, %d "
           "pages, %lld tokens\n",
           op_dtype_name(args->kv_dtype), (double) kv_token / 1024,
           (double) ask.page_bytes / 1048576, KV_PAGE, size.n_pages,
           (long long) size.n_pages * KV_PAGE);

    const sizing_load_t load = {
        .step_weights = model->step_weights,
        .kv_per_token = kv_token,
        .n_pages = size.n_pages,
        .context = size.max_len,
        .mean = args->mean > 0 ? args->mean : (size.max_len + 3) / 4,
        .max_seqs = args->seqs,
        .bytes_per_sec = args->bandwidth * 1e9,
    };
    sizing_plan_t plan;

    if (load.mean > load.context) {
        fflush(stdout);
        fprintf(stderr,
                "llm-engine: --mean-tokens %d is above the context of %d\n",
                load.mean, load.context);
        return 1;
    }

    sizing_plan(&load, &plan);
    print_requests(&load, &plan);

    return 0;
}


int
cli_plan(int argc, char **argv)
{
    plan_model_t model = { .dtype = NULL };
    plan_args_t args = {
        .dtype = -1,
        .kv_dtype = OP_F16,
        .utilization = KV_UTILIZATION,
        .rows = 2048,
        .seqs = 128,
    };

    if (parse_args(&args, argc, argv) != LLM_OK) {
        return 1;
    }

    if (args.memory == 0) {
        kv_memory_t memory;

        kv_memory_read("", &memory);
        args.memory = memory.total;
    }

    const int rc = args.like != NULL ? model_like(&args, &model)
                                     : model_file(&args, &model);

    return rc == LLM_OK ? print_plan(&args, &model) : 1;
}

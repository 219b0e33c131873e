/*
 * See tile.h.  Names of exceptions are the manual's: #GP for a configuration
 * that LDTILECFG refuses, #UD for an instruction that the configuration does
 * not allow.  Compiled with CPU_TILE_EMU only.
 */

#include "t/ops/twin/tile.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64 };

/* a row of sums */
typedef int32_t sums_t __attribute__((vector_size(ROW_BYTES)));

typedef struct {
    cpu_tile_config_t config;
    bool configured;
    uint8_t data[TILES][ROWS][ROW_BYTES];
} tiles_t;

twin_faults_t twin_faults;

static _Thread_local tiles_t tiles;
static atomic_uint_fast64_t products;
static atomic_int configured;


static void
expect(bool good, const char *exception, const char *what)
{
    if (!good) {
        fprintf(stderr, "tiles: %s: %s\n", exception, what);
        abort();
    }
}


bool
cpu_tile_permit(void)
{
    return !twin_faults.absent;
}


uint64_t
twin_products(void)
{
    return atomic_load_explicit(&products, memory_order_relaxed);
}


int
twin_configured(void)
{
    return atomic_load_explicit(&configured, memory_order_relaxed);
}


static void
check_config(const cpu_tile_config_t *config)
{
    static const uint8_t zeros[16];

    expect(config->palette <= 1, "#GP", "palette");
    expect(memcmp(config->reserved, zeros, sizeof(config->reserved)) == 0,
           "#GP", "reserved bytes");

    for (int t = 0; t < 16; t++) {
        const int rows = config->rows[t];
        const int bytes = config->row_bytes[t];

        expect(t < TILES || (rows == 0 && bytes == 0), "#GP", "no such tile");
        expect(rows <= ROWS, "#GP", "rows");
        expect(bytes <= ROW_BYTES, "#GP", "bytes of a row");
        expect((rows == 0) == (bytes == 0), "#GP", "rows without bytes");
    }
}


static void
set_configured(bool now)
{
    if (now != tiles.configured) {
        atomic_fetch_add_explicit(&configured, now ? 1 : -1,
                                  memory_order_relaxed);
    }

    tiles.configured = now;
}


/* Palette 0 is what release does. */
void
cpu_tile_configure(const cpu_tile_config_t *config)
{
    check_config(config);
    memset(tiles.data, 0, sizeof(tiles.data));
    tiles.config = *config;
    set_configured(config->palette == 1);
}


void
cpu_tile_release(void)
{
    memset(&tiles.config, 0, sizeof(tiles.config));
    memset(tiles.data, 0, sizeof(tiles.data));
    set_configured(false);
}


static void
check_tile(int t)
{
    expect(tiles.configured, "#UD", "no configuration");
    expect(t >= 0 && t < TILES && tiles.config.rows[t] > 0, "#UD",
           "tile without configuration");
}


void
twin_zero(int t)
{
    check_tile(t);
    memset(tiles.data[t], 0, sizeof(tiles.data[t]));
}


void
twin_load(int t, const void *p, int64_t stride)
{
    check_tile(t);
    expect(tiles.config.start_row == 0, "#UD", "start row");
    memset(tiles.data[t], 0, sizeof(tiles.data[t]));

    for (int r = 0; r < tiles.config.rows[t]; r++) {
        memcpy(tiles.data[t][r], (const uint8_t *) p + r * stride,
               tiles.config.row_bytes[t]);
    }
}


void
twin_store(int t, void *p, int64_t stride)
{
    check_tile(t);
    expect(tiles.config.start_row == 0, "#UD", "start row");

    for (int r = 0; r < tiles.config.rows[t]; r++) {
        memcpy((uint8_t *) p + r * stride, tiles.data[t][r],
               tiles.config.row_bytes[t]);
    }
}


static void
check_product(int c, int a, int b)
{
    const cpu_tile_config_t *f = &tiles.config;

    check_tile(c);
    check_tile(a);
    check_tile(b);
    expect(c != a && a != b && c != b, "#UD", "one tile twice");
    expect(f->row_bytes[c] % 4 == 0 && f->row_bytes[a] % 4 == 0
               && f->row_bytes[b] % 4 == 0,
           "#UD", "rows of no whole sums");
    expect(f->rows[c] == f->rows[a], "#UD", "rows of dots");
    expect(f->row_bytes[c] == f->row_bytes[b], "#UD", "columns of dots");
    expect(f->row_bytes[a] / 4 == f->rows[b], "#UD", "inputs");
}


/* Sums wrap around, as the processor's do; columns that c does not have stay
 * 0, as those of b are.  Of a row of b, input k is byte k of each lane. */
void
twin_dot(int c, int a, int b)
{
    const int inputs = tiles.config.row_bytes[a];
    sums_t w[4 * ROWS], sums;

    check_product(c, a, b);
    atomic_fetch_add_explicit(&products, 1, memory_order_relaxed);

    for (int k = 0; k < inputs; k++) {
        memcpy(&w[k], tiles.data[b][k / 4], sizeof(sums));
        w[k] = w[k] << (24 - k % 4 * 8) >> 24;
    }

    for (int m = 0; m < tiles.config.rows[c]; m++) {
        memcpy(&sums, tiles.data[c][m], sizeof(sums));

        for (int k = 0; k < inputs; k++) {
            sums += (int8_t) tiles.data[a][m][k] * w[k];
        }

        if (twin_faults.wrong && m == 11) {
            sums[3] ^= 1;
        }

        memcpy(tiles.data[c][m], &sums, sizeof(sums));
    }
}

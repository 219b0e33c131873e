/*
 * Under sanitizers, where kernels take 10 to 50 times as long, a test takes
 * the small set of its table: fewer shapes, but each type, head size and
 * instruction set, one row, odd widths, and both sides of the tiles' edges.
 */

#ifndef T_OPS_LIB_SMALL_H
#define T_OPS_LIB_SMALL_H

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SMALL_SET = 1 };
#else
enum { SMALL_SET = 0 };
#endif

/* TSan takes the longest */
#ifdef __SANITIZE_THREAD__
enum { SMALLEST_SET = 1 };
#else
enum { SMALLEST_SET = 0 };
#endif

#endif /* T_OPS_LIB_SMALL_H */

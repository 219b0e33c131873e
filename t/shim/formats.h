/*
 * Half-precision and bfloat16 numbers as bits, rounded to nearest even, as the
 * conversion instructions of a device do it.
 */

#ifndef T_SHIM_FORMATS_H
#define T_SHIM_FORMATS_H

#include <stdint.h>

float shim_f16_to_f32(uint16_t bits);
uint16_t shim_f32_to_f16(float x);
float shim_bf16_to_f32(uint16_t bits);
uint16_t shim_f32_to_bf16(float x);

#endif

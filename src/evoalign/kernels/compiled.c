// SPDX-License-Identifier: Apache-2.0
// The numbers of evoalign on a CPU: noise, moves of the mean, sums of products, the hash. `evoalign/noise.py`,
// `spaces/` and `engines/hash.py` have the same in plain torch, with the same bits: every number is computed by itself,
// in single precision, in one order, so neither vector width nor the number of threads shows in it. No product is fused
// with a sum (-ffp-contract=off).
//
// A part of a tensor is `runs` rows of `length` consecutive elements; row r begins at element `base + r * pitch` of the
// whole tensor. Strides are counted in numbers.

#include <float.h>
#include <stdint.h>
#include <string.h>

_Static_assert(FLT_EVAL_METHOD == 0, "each operation on floats has to be rounded to a float");

#ifndef CLONES
#define CLONES // variants of a function for several instruction sets, of which the loader takes one
#endif
#define CALLS 32 // Philox calls at once: 256 normals, 1 KiB
#define CHUNK (8 * CALLS)
#define COLUMNS 256 // of a matrix, whose part of the right factors stays in the first cache
#define ROWS 4

typedef int64_t i64;
typedef uint64_t u64;
typedef uint32_t u32;

enum { FLOAT32 = 0, BFLOAT16 = 1 };

u32 evoalign_source(void) { return EVOALIGN_SOURCE; } // which source this is the library of

// Philox 4x32-10 (Salmon et al., SC 2011) of CALLS counters from `block` on, and the quantiles its words address.
static inline __attribute__((always_inline)) void draw(const float *table, u32 key0, u32 key1, u32 generation,
                                                       u32 member, u64 block, float *out) {
  u32 c0[CALLS], c1[CALLS], c2[CALLS], c3[CALLS];
  for (int j = 0; j < CALLS; j++) {
    c0[j] = (u32)(block + j);
    c1[j] = (u32)((block + j) >> 32);
    c2[j] = generation;
    c3[j] = member;
  }
  for (int round = 0; round < 10; round++) {
    for (int j = 0; j < CALLS; j++) {
      u64 p0 = (u64)c0[j] * 0xD2511F53u, p1 = (u64)c2[j] * 0xCD9E8D57u;
      u32 n0 = (u32)(p1 >> 32) ^ c1[j] ^ key0, n2 = (u32)(p0 >> 32) ^ c3[j] ^ key1;
      c1[j] = (u32)p1;
      c3[j] = (u32)p0;
      c0[j] = n0;
      c2[j] = n2;
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  for (int j = 0; j < CALLS; j++) { // the table is rotated by half; see evoalign.noise.table
    c0[j] ^= 0x80008000u;
    c1[j] ^= 0x80008000u;
    c2[j] ^= 0x80008000u;
    c3[j] ^= 0x80008000u;
  }
  for (int j = 0; j < CALLS; j++) {
    float *o = out + 8 * j;
    o[0] = table[c0[j] & 0xffff];
    o[1] = table[c0[j] >> 16];
    o[2] = table[c1[j] & 0xffff];
    o[3] = table[c1[j] >> 16];
    o[4] = table[c2[j] & 0xffff];
    o[5] = table[c2[j] >> 16];
    o[6] = table[c3[j] & 0xffff];
    o[7] = table[c3[j] >> 16];
  }
}

// Rounded to nearest, ties to even; a NaN stays one.
static inline __attribute__((always_inline)) uint16_t bfloat16(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  uint16_t rounded = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : rounded;
}

static inline __attribute__((always_inline)) void store(const float *x, void *out, i64 stride, int count, int dtype) {
  if (dtype == BFLOAT16) {
    uint16_t *o = out;
    if (stride == 1)
      for (int j = 0; j < count; j++) o[j] = bfloat16(x[j]);
    else
      for (int j = 0; j < count; j++) o[j * stride] = bfloat16(x[j]);
  } else {
    float *o = out;
    if (stride == 1)
      for (int j = 0; j < count; j++) o[j] = x[j];
    else
      for (int j = 0; j < count; j++) o[j * stride] = x[j];
  }
}

static inline __attribute__((always_inline)) void *at(void *tensor, i64 place, int dtype) {
  return (char *)tensor + place * (dtype == BFLOAT16 ? 2 : 4);
}

// out[m] = round(width_m * normal + mean); `mean` may be NULL. Members that share a stream and follow one another, as
// an antithetic pair does, share its draw.
CLONES void evoalign_scaled(const float *table, u32 key0, u32 key1, u32 generation, const u32 *streams,
                            const float *widths, i64 members, i64 base, i64 pitch, i64 runs, i64 length,
                            const float *mean, i64 mean_row, i64 mean_column, void *out, i64 out_member, i64 out_row,
                            i64 out_column, int dtype) {
  float noise[CHUNK], x[CHUNK];
  for (i64 r = 0; r < runs; r++) {
    i64 start = base + r * pitch, lead = start % 8;
    for (i64 p = -lead; p < length; p += CHUNK) {
      int low = p < 0 ? (int)-p : 0, high = length - p < CHUNK ? (int)(length - p) : CHUNK, count = high - low;
      const float *m = mean ? mean + r * mean_row + (p + low) * mean_column : 0;
      for (i64 i = 0; i < members; i++) {
        if (i == 0 || streams[i] != streams[i - 1])
          draw(table, key0, key1, generation, streams[i], (u64)(start + p) / 8, noise);
        const float *n = noise + low;
        float width = widths[i];
        if (!m)
          for (int j = 0; j < count; j++) x[j] = n[j] * width;
        else if (mean_column == 1)
          for (int j = 0; j < count; j++) x[j] = n[j] * width + m[j];
        else
          for (int j = 0; j < count; j++) x[j] = n[j] * width + m[j * mean_column];
        store(x, at(out, i * out_member + r * out_row + (p + low) * out_column, dtype), out_column, count, dtype);
      }
    }
  }
}

// Where the mean lies, and what goes with it: `served` gets it rounded, `start` is what it decays to; both may be NULL.
typedef struct {
  float *master;
  i64 master_row, master_column;
  void *served;
  i64 served_row, served_column;
  const float *start;
  i64 start_row, start_column;
  float share, step, decay; // 1 / N, the step, the decay
  int dtype;                // of what is served
} Mean;

// The end of an update for `count` numbers of row r from column c on.
static inline __attribute__((always_inline)) void move(const Mean *t, const float *total, i64 r, i64 c, int count) {
  float x[COLUMNS];
  float *master = t->master + r * t->master_row + c * t->master_column;
  i64 stride = t->master_column;
  for (int j = 0; j < count; j++) x[j] = master[j * stride];
  if (t->start) {
    const float *start = t->start + r * t->start_row + c * t->start_column;
    for (int j = 0; j < count; j++) x[j] = x[j] - (x[j] - start[j * t->start_column]) * t->decay;
  }
  for (int j = 0; j < count; j++) x[j] = x[j] + total[j] * t->share * t->step;
  store(x, master, stride, count, FLOAT32);
  if (t->served)
    store(x, at(t->served, r * t->served_row + c * t->served_column, t->dtype), t->served_column, count, t->dtype);
}

// Move the mean by dense noise: total = sum over streams in order of weight * normal.
CLONES void evoalign_dense(const float *table, u32 key0, u32 key1, u32 generation, const u32 *streams,
                           const float *weights, i64 terms, i64 base, i64 pitch, i64 runs, i64 length, const Mean *mean) {
  float noise[CHUNK], total[CHUNK];
  Mean t = *mean;
  for (i64 r = 0; r < runs; r++) {
    i64 start = base + r * pitch, lead = start % 8;
    for (i64 p = -lead; p < length; p += CHUNK) {
      int low = p < 0 ? (int)-p : 0, high = length - p < CHUNK ? (int)(length - p) : CHUNK;
      for (int j = 0; j < CHUNK; j++) total[j] = 0.0f;
      for (i64 k = 0; k < terms; k++) {
        draw(table, key0, key1, generation, streams[k], (u64)(start + p) / 8, noise);
        float weight = weights[k];
        for (int j = 0; j < CHUNK; j++) total[j] = total[j] + noise[j] * weight;
      }
      move(&t, total + low, r, p + low, high - low);
    }
  }
}

// Move rows [first, last) of a matrix by sum_k left[k] right[k]; left is [terms, rows], right [terms, columns].
CLONES void evoalign_product(const float *left, const float *right, i64 terms, i64 rows, i64 columns, i64 first,
                             i64 last, const Mean *mean) {
  float total[ROWS][COLUMNS];
  Mean t = *mean;
  for (i64 c = 0; c < columns; c += COLUMNS) {
    int count = columns - c < COLUMNS ? (int)(columns - c) : COLUMNS;
    for (i64 r = first; r < last; r += ROWS) {
      int some = last - r < ROWS ? (int)(last - r) : ROWS;
      memset(total, 0, sizeof total);
      for (i64 k = 0; k < terms; k++) {
        const float *b = right + k * columns + c, *a = left + k * rows + r;
        if (some == ROWS) {
          float a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3];
          for (int j = 0; j < count; j++) {
            total[0][j] = total[0][j] + a0 * b[j];
            total[1][j] = total[1][j] + a1 * b[j];
            total[2][j] = total[2][j] + a2 * b[j];
            total[3][j] = total[3][j] + a3 * b[j];
          }
        } else {
          for (int i = 0; i < some; i++)
            for (int j = 0; j < count; j++) total[i][j] = total[i][j] + a[i] * b[j];
        }
      }
      for (int i = 0; i < some; i++) move(&t, total[i], r + i, c, count);
    }
  }
}

// Sum of splitmix64(bits + golden * (index + 1)) modulo 2^64 over a part of a float32 tensor; see engines/hash.py.
CLONES u64 evoalign_sum(const float *tensor, i64 row, i64 column, i64 base, i64 pitch, i64 runs, i64 length) {
  u64 total = 0;
  for (i64 r = 0; r < runs; r++) {
    const float *x = tensor + r * row;
    u64 index = (u64)(base + r * pitch) + 1;
    for (i64 j = 0; j < length; j++) {
      u32 bits;
      memcpy(&bits, x + j * column, 4);
      u64 z = bits + (index + (u64)j) * 0x9E3779B97F4A7C15u;
      z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
      z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
      total += z ^ (z >> 31);
    }
  }
  return total;
}

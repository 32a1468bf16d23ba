// SPDX-License-Identifier: Apache-2.0
// Kernels for a CPU: noise, moves of the mean, sums of products, the hash, and members' low-rank terms in a layer. Each
// number is computed in single precision and in one order, so its bits depend neither on the vector width nor on the
// number of threads. No product is fused with a sum (-ffp-contract=off). Plain torch computes the same bits for the
// first four (`evoalign/noise.py`, `spaces/`, `engines/hash.py`), and other last bits for the layer
// (`kernels/reference.py`).
//
// A part of a tensor is `runs` rows of `length` consecutive elements; row r begins at element `base + r * pitch` of the
// whole tensor. Strides count numbers, not bytes.

#include <float.h>
#include <stdint.h>
#include <string.h>

_Static_assert(FLT_EVAL_METHOD == 0, "each float operation must be rounded to float");

#ifndef CLONES
#define CLONES // variants of a function for several instruction sets; the loader selects one
#endif
#define CALLS 32 // Philox calls per draw: 256 normals, 1 KiB
#define CHUNK (8 * CALLS)
#define COLUMNS 256 // of a matrix tile, so that its part of the right factors stays in the L1 cache
#define ROWS 4

#define LANES 16 // partial sums of a dot product
#define TERMS 16 // the highest rank
#define HEAD 512 // the widest head

typedef int64_t i64;
typedef uint64_t u64;
typedef uint32_t u32;
typedef int32_t i32;

enum { FLOAT32 = 0, BFLOAT16 = 1 };

u32 evoalign_source(void) { return EVOALIGN_SOURCE; } // identifies the source that the library was built from

// Philox 4x32-10 (Salmon et al., SC 2011) of CALLS counters starting at `block`, and the quantiles for its words.
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

// Round to nearest, ties to even; NaN stays NaN.
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

// out[m] = round(width_m * normal + mean); `mean` may be NULL. Consecutive members of the same stream, such as an
// antithetic pair, share its draw.
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

// The mean in memory. `served` receives it rounded, `start` is the anchor of the decay; both may be NULL.
typedef struct {
  float *master;
  i64 master_row, master_column;
  void *served;
  i64 served_row, served_column;
  const float *start;
  i64 start_row, start_column;
  float share, step, decay; // 1 / N, the step, the decay
  int dtype;                // of the served weights
} Mean;

// Apply decay and move to `count` numbers of row r starting at column c, and store the served weights.
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

// --- members' low-rank terms in a layer: see evoalign/kernels/population.py ---
//
// Rows `first` to `last` of T; all tensors are contiguous. `members` is each row's slot, or -1 for a row without terms.
// Factors are `a` [S, padded, K] and `b` [S, N, padded], of which the first `rank` are used. Gains and biases of members
// are rows of a tensor [S + 1, N], row 0 for a row of T without a member; with a pitch of 0 all rows share one gain.

static inline __attribute__((always_inline)) float dot(const float *x, const float *y, i64 count) {
  float sum[LANES] = {0};
  i64 i = 0;
  for (; i + LANES <= count; i += LANES)
    for (int j = 0; j < LANES; j++) sum[j] += x[i + j] * y[i + j];
  for (int j = 0; i + j < count; j++) sum[j] += x[i + j] * y[i + j];
  for (int half = LANES / 2; half; half /= 2)
    for (int j = 0; j < half; j++) sum[j] += sum[j + half];
  return sum[0];
}

// The dot products of a row with each rank of a slot's A.
static inline __attribute__((always_inline)) void shrink(const float *x, const float *a, i64 slot, i64 count, i64 rank,
                                                         i64 padded, float *dots) {
  for (i64 r = 0; r < rank; r++) dots[r] = dot(x, a + (slot * padded + r) * count, count);
}

// y += scaling * dots B^T, for `count` of the N numbers starting at `from`.
static inline __attribute__((always_inline)) void expand(float *y, const float *dots, const float *b, i64 slot, i64 n,
                                                         i64 from, i64 count, i64 rank, i64 padded, float scaling) {
  const float *row = b + (slot * n + from) * padded;
  for (i64 r = 0; r < rank; r++) {
    float scaled = dots[r] * scaling;
    if (padded == 1)
      for (i64 j = 0; j < count; j++) y[j] += scaled * row[j];
    else
      for (i64 j = 0; j < count; j++) y[j] += scaled * row[j * padded + r];
  }
}

static inline __attribute__((always_inline)) void normalize(const float *x, const float *weight, float eps, i64 count,
                                                            float *out) {
  float by = 1.0f / __builtin_sqrtf(dot(x, x, count) / (float)count + eps);
  for (i64 j = 0; j < count; j++) out[j] = x[j] * by * weight[j];
}

CLONES void evoalign_add(float *y, i64 pitch, const float *x, const float *a, const float *b, const i32 *members,
                         i64 rank, i64 padded, float scaling, i64 inner, i64 n, i64 first, i64 last) {
  float dots[TERMS];
  for (i64 t = first; t < last; t++) {
    if (members[t] < 0) continue;
    shrink(x + t * inner, a, members[t], inner, rank, padded, dots);
    expand(y + t * pitch, dots, b, members[t], n, 0, n, rank, padded, scaling);
  }
}

// The pending term comes from the dots `given` [T, parts, rank] or from the input `x` and `a`. Without `b` there is none.
CLONES void evoalign_norm(float *hidden, float *residual, const float *weight, i64 pitch, float eps, const i32 *members,
                          i64 rank, i64 padded, float scaling, i64 width, const float *x, const float *a, i64 inner,
                          const float *given, i64 parts, const float *b, const float *a0, const float *a1,
                          const float *a2, i64 layers, float *out, float *dots, i64 first, i64 last) {
  const float *into[3] = {a0, a1, a2};
  for (i64 t = first; t < last; t++) {
    i64 slot = members[t];
    float *total = hidden + t * width, *normed = out + t * width;
    if (residual) {
      float *other = residual + t * width;
      for (i64 j = 0; j < width; j++) other[j] += total[j];
      total = other;
    }
    if (b && slot >= 0) {
      float taken[TERMS] = {0};
      if (x)
        shrink(x + t * inner, a, slot, inner, rank, padded, taken);
      else
        for (i64 p = 0; p < parts; p++)
          for (i64 r = 0; r < rank; r++) taken[r] += given[(t * parts + p) * rank + r];
      expand(total, taken, b, slot, width, 0, width, rank, padded, scaling);
    }
    normalize(total, weight + (slot + 1) * pitch, eps, width, normed);
    for (i64 l = 0; l < layers; l++) {
      float *found = dots + (t * layers + l) * rank;
      for (i64 r = 0; r < rank; r++) found[r] = 0;
      if (slot >= 0) shrink(normed, into[l], slot, width, rank, padded, found);
    }
  }
}

CLONES void evoalign_rotate(float *qkv, const i64 *positions, const float *cos_sin, i64 rotary, const float *dots,
                            const float *b0, const float *b1, const float *b2, const i32 *members, i64 rank,
                            i64 padded, float scaling, i64 heads, i64 shared, i64 size, const float *q_norm,
                            i64 q_pitch, const float *k_norm, i64 k_pitch, const float *bias, float eps, i64 first,
                            i64 last) {
  const float *b[3] = {b0, b1, b2};
  i64 widths[3] = {heads * size, shared * size, shared * size}, half = rotary / 2, n = (heads + 2 * shared) * size;
  for (i64 t = first; t < last; t++) {
    i64 own = (i64)members[t] + 1;
    float *head = qkv + t * n, *part = head;
    if (bias)
      for (i64 j = 0; j < n; j++) head[j] += bias[own * n + j];
    for (int i = 0; i < 3; part += widths[i++])
      if (members[t] >= 0)
        expand(part, dots + (t * 3 + i) * rank, b[i], members[t], widths[i], 0, widths[i], rank, padded, scaling);
    const float *cosine = cos_sin + positions[t] * rotary, *sine = cosine + half;
    for (i64 h = 0; h < heads + shared; h++, head += size) {
      const float *weight = h < heads ? q_norm : k_norm;
      if (weight) normalize(head, weight + own * (h < heads ? q_pitch : k_pitch), eps, size, head);
      for (i64 j = 0; j < half; j++) {
        float one = head[j], other = head[j + half];
        head[j] = one * cosine[j] - other * sine[j];
        head[j + half] = other * cosine[j] + one * sine[j];
      }
    }
  }
}

// e^x within two units in the last place for x in [-87, 88], infinite above, NaN for NaN (Cephes' expf).
static inline __attribute__((always_inline)) float power(float given) {
  float x = given < -87.0f ? -87.0f : given > 88.0f ? 88.0f : given;
  float shifted = x * 1.44269504f + 12582912.0f, whole = shifted - 12582912.0f; // rounded to a whole number
  float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f, p = 1.9875691500e-4f, scale;
  p = p * rest + 1.3981999507e-3f;
  p = p * rest + 8.3334519073e-3f;
  p = p * rest + 4.1665795894e-2f;
  p = p * rest + 1.6666665459e-1f;
  p = p * rest + 5.0000001201e-1f;
  p = p * (rest * rest) + rest + 1.0f;
  u32 bits;
  memcpy(&bits, &shifted, 4);
  bits = (bits + 127u) << 23;
  memcpy(&scale, &bits, 4);
  return given > 88.0f ? __builtin_inff() : p * scale;
}

CLONES void evoalign_gate(const float *gate_up, const float *dots, const float *b0, const float *b1,
                          const float *down_a, const i32 *members, i64 rank, i64 padded, float scaling, i64 inner,
                          float *out, float *parts, i64 first, i64 last) {
  float left[COLUMNS], right[COLUMNS];
  for (i64 t = first; t < last; t++) {
    i64 slot = members[t];
    const float *row = gate_up + t * 2 * inner, *given = dots + t * 2 * rank;
    for (i64 c = 0; c < inner; c += COLUMNS) {
      i64 count = inner - c < COLUMNS ? inner - c : COLUMNS;
      memcpy(left, row + c, (size_t)count * 4);
      memcpy(right, row + inner + c, (size_t)count * 4);
      if (slot >= 0) {
        expand(left, given, b0, slot, inner, c, count, rank, padded, scaling);
        expand(right, given + rank, b1, slot, inner, c, count, rank, padded, scaling);
      }
      for (i64 j = 0; j < count; j++) out[t * inner + c + j] = left[j] / (1.0f + power(-left[j])) * right[j];
    }
    if (down_a) {
      for (i64 r = 0; r < rank; r++) parts[t * rank + r] = 0;
      if (slot >= 0) shrink(out + t * inner, down_a, slot, inner, rank, padded, parts + t * rank);
    }
  }
}

// Attention of one token per row over its past, after the token's keys and values are stored there: see attention.py.
// The softmax is computed online over blocks of columns.
CLONES void evoalign_decode(const float *qkv, float *keys, float *values, const i64 *slots, const i64 *positions,
                            const i64 *origins, const i64 *begun, i64 heads, i64 shared, i64 room, i64 size,
                            float scale, float *out, i64 first, i64 last) {
  float query[HEAD], total[HEAD], scores[COLUMNS];
  for (i64 t = first; t < last; t++) {
    const float *q = qkv + t * (heads + 2 * shared) * size, *own = q + heads * size;
    i64 seen = positions[t] + 1;
    for (i64 h = 0; h < shared; h++) {
      i64 place = ((slots[t] * shared + h) * room + positions[t]) * size;
      memcpy(keys + place, own + h * size, (size_t)size * 4);
      memcpy(values + place, own + (shared + h) * size, (size_t)size * 4);
    }
    for (i64 h = 0; h < heads; h++) {
      i64 past = (slots[t] * shared + h / (heads / shared)) * room * size;
      i64 origin = (origins[t] * shared + h / (heads / shared)) * room * size;
      float highest = -FLT_MAX, weight = 0;
      for (i64 d = 0; d < size; d++) query[d] = q[h * size + d] * scale;
      memset(total, 0, (size_t)size * 4);
      for (i64 c = 0; c < seen; c += COLUMNS) {
        i64 count = seen - c < COLUMNS ? seen - c : COLUMNS;
        float before = highest;
        for (i64 j = 0; j < count; j++) {
          scores[j] = dot(query, keys + (c + j < begun[t] ? origin : past) + (c + j) * size, size);
          highest = scores[j] > highest ? scores[j] : highest;
        }
        float kept = power(before - highest);
        weight *= kept;
        for (i64 d = 0; d < size; d++) total[d] *= kept;
        for (i64 j = 0; j < count; j++) scores[j] = power(scores[j] - highest);
        for (i64 j = 0; j < count; j++) {
          const float *v = values + (c + j < begun[t] ? origin : past) + (c + j) * size;
          weight += scores[j];
          for (i64 d = 0; d < size; d++) total[d] += scores[j] * v[d];
        }
      }
      for (i64 d = 0; d < size; d++) out[(t * heads + h) * size + d] = total[d] / weight;
    }
  }
}

/* The CPU provider's loops: attention tiles, pack, merge, V-up. Plain C, no PyTorch headers.
 *
 * Matrix products are those of the BLAS that PyTorch carries, passed in as function pointers.
 * Work of several threads is cut into shares; the bits depend on how many, not on who runs which.
 * All sums run in FP32. Strides count elements; the last dimension of every tensor is contiguous.
 * Compiled by anabranch.native on first use, for the machine it runs on.
 */

#include <math.h>
#include <omp.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

enum { F32, BF16, F16, E4M3 };
static const int64_t ITEM[] = {4, 2, 2, 1};

/* Fortran sgemm, and MKL's BF16 product with an FP32 result. */
typedef void (*sgemm_fn)(const char *, const char *, const int *, const int *, const int *,
                         const float *, const float *, const int *, const float *, const int *,
                         const float *, float *, const int *);
typedef void (*bf16gemm_fn)(int, int, int, int, int, int, float, const uint16_t *, int,
                            const uint16_t *, int, float, float *, int);

/* MKL's limit on the threads of the products that a thread asks for; returns the one before. */
typedef int (*limit_fn)(int);

/* A share is for one thread, so the BLAS must not cut it again. */
typedef struct {
    int omp, mkl;
} Limits;

static Limits one_thread(limit_fn limit) {
    Limits before = {omp_get_max_threads(), limit ? limit(1) : 0};
    omp_set_num_threads(1);
    return before;
}

static void restore(limit_fn limit, Limits before) {
    omp_set_num_threads(before.omp);
    if (limit) limit(before.mkl);
}

/* ---- shares -------------------------------------------------------------------------------- */

typedef void (*share_fn)(const void *task, int64_t share);

/* Late is by so many nanoseconds and such a part of all; alone for so many times what was lost. */
enum { LATE = 1000000, PART = 4, PATIENCE = 10 };
static atomic_int_fast64_t alone_until;

static int64_t nanoseconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Run every share once, on as many threads of OpenMP's team, the one of PyTorch's operators. A
 * thread whose core another process wants comes late by whole time slices, and the others must wait
 * for it. Once that has happened, this thread runs all shares itself for a while. */
static void in_shares(share_fn run, const void *task, int64_t shares) {
    int64_t begin = shares > 1 ? nanoseconds(CLOCK_MONOTONIC) : 0;
    if (shares == 1 || begin < atomic_load(&alone_until)) {
        for (int64_t share = 0; share < shares; share++) run(task, share);
        return;
    }
    atomic_int_fast64_t next = 0, most_lost = 0;
#pragma omp parallel num_threads(shares)
    {
        int64_t ran = -nanoseconds(CLOCK_THREAD_CPUTIME_ID), share;
        while ((share = atomic_fetch_add(&next, 1)) < shares) run(task, share);
        ran += nanoseconds(CLOCK_THREAD_CPUTIME_ID);
        int64_t lost = nanoseconds(CLOCK_MONOTONIC) - begin - ran;
        if (lost > atomic_load(&most_lost)) atomic_store(&most_lost, lost);
    }
    int64_t lost = atomic_load(&most_lost), end = nanoseconds(CLOCK_MONOTONIC);
    if (lost > LATE && lost > (end - begin) / PART)
        atomic_store(&alone_until, end + PATIENCE * lost);
}

/* ---- number formats ---------------------------------------------------------------------- */

static inline float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000 | mantissa << 13);
    if (exponent) return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
    return bits_to_float(sign | float_to_bits((float)mantissa * 0x1p-24f));
}

static uint16_t float_to_half(float f) {
    uint32_t bits = float_to_bits(f), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) /* subnormal: let the FPU round to a multiple of 2^-24 */
        return (uint16_t)(sign | (uint32_t)nearbyintf(bits_to_float(magnitude) * 0x1p24f));
    uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | ((rounded - 0x38000000) >> 13));
}

static inline uint16_t float_to_bf16(float f) {
    uint32_t bits = float_to_bits(f);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

static float e4m3_table[256];

static void __attribute__((constructor)) fill_e4m3_table(void) {
    for (int code = 0; code < 256; code++) {
        int exponent = code >> 3 & 15, mantissa = code & 7;
        float value = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
        if ((code & 127) == 127) value = NAN;
        e4m3_table[code] = code & 128 ? -value : value;
    }
}

/* dst[i] = src[i] * scale; the scale is that of an FP8 cache, and 1 for other formats. */
static void load_row(float *restrict dst, const void *restrict src, int64_t n, int dtype,
                     float scale) {
    if (dtype == F32) {
        memcpy(dst, src, n * 4);
    } else if (dtype == BF16) {
        const uint16_t *from = src;
        for (int64_t i = 0; i < n; i++) dst[i] = bits_to_float((uint32_t)from[i] << 16);
    } else if (dtype == F16) {
        const uint16_t *from = src;
        int64_t i = 0;
#if defined(__F16C__)
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from + i))));
#endif
        for (; i < n; i++) dst[i] = half_to_float(from[i]);
    } else {
        const uint8_t *from = src;
        for (int64_t i = 0; i < n; i++) dst[i] = e4m3_table[from[i]] * scale;
    }
}

/* dst[i] = src[i] * factor, rounded to nearest even. */
static void store_row(void *restrict dst, const float *restrict src, int64_t n, int dtype,
                      float factor) {
    if (dtype == F32) {
        float *to = dst;
        for (int64_t i = 0; i < n; i++) to[i] = src[i] * factor;
    } else if (dtype == BF16) {
        uint16_t *to = dst;
        for (int64_t i = 0; i < n; i++) to[i] = float_to_bf16(src[i] * factor);
    } else {
        uint16_t *to = dst;
        int64_t i = 0;
#if defined(__F16C__)
        __m256 factors = _mm256_set1_ps(factor);
        for (; i + 8 <= n; i += 8)
            _mm_storeu_si128((void *)(to + i),
                             _mm256_cvtps_ph(_mm256_mul_ps(_mm256_loadu_ps(src + i), factors),
                                             _MM_FROUND_TO_NEAREST_INT));
#endif
        for (; i < n; i++) to[i] = float_to_half(src[i] * factor);
    }
}

/* exp for x <= 0 within 2 ulp, written so that compilers vectorise it: 2^k times a polynomial
 * of the remainder (coefficients of Cephes' expf). Below -87.3, where the result would be
 * subnormal, it is 0. */
static inline float exp_negative(float x) {
    float clamped = x > -87.3f ? x : -87.3f;
    float k = nearbyintf(clamped * 1.44269504088896341f);
    float r = clamped - k * 0.693359375f + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    float power = bits_to_float((uint32_t)((int32_t)k + 127) << 23);
    return x < -87.3f ? 0.0f : p * power + (x - x); /* the last term passes NaN on */
}

/* ---- products of few rows ------------------------------------------------------------------
 *
 * With 16 rows, the heads of one rank, a BLAS reaches half of the FMA units' rate. Here tiles of
 * registers hold the sums, and a tile of FEW_KEYS keys stays in the L2 cache. */

#if defined(__AVX512F__)
enum { LANES = 16, DOT_KEYS = 12 };
#elif defined(__AVX__)
enum { LANES = 8, DOT_KEYS = 6 };
#else
enum { LANES = 4, DOT_KEYS = 6 };
#endif
enum { FEW_ROWS = 64, FEW_KEYS = 96, DOT_VECTORS = 2, SUM_ROWS = 4, SUM_VECTORS = 2 };
enum { PREFETCH_STEP = 32 }; /* elements: a line of 16-bit formats */
typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

/* Keep a value in a register: a compiler would rather load it again for each of its uses. */
#if defined(__x86_64__)
#define HOLD(value) __asm__("" : "+v"(value))
#elif defined(__aarch64__)
#define HOLD(value) __asm__("" : "+w"(value))
#else
#define HOLD(value)
#endif

/* scores[row][k] = scale * queries[.][row] . keys[k]: the lanes are rows. Of the DOT_KEYS products
 * the first `count` are stored. Meanwhile it asks for one row of each of `ahead`, keys of the next
 * tile, a line at a time: pages lie anywhere, so the CPU does not foresee them. */
INLINE void dot_tile(const float *queries, int64_t query_row, const float *keys, int64_t key_row,
                     int64_t width, float scale, float *scores, int64_t score_row, int64_t rows,
                     int64_t count, const char *const *ahead, int64_t item, const int vectors) {
    vector sum[DOT_KEYS][DOT_VECTORS] = {0};
    for (int64_t i = 0; i < width; i++) {
        if (i % PREFETCH_STEP == 0)
            for (int k = 0; k < DOT_KEYS; k++) __builtin_prefetch(ahead[k] + i * item, 0, 2);
        vector query[DOT_VECTORS];
        for (int v = 0; v < vectors; v++) {
            query[v] = *(const vector *)(queries + i * query_row + v * LANES);
            HOLD(query[v]);
        }
        for (int k = 0; k < DOT_KEYS; k++)
            for (int v = 0; v < vectors; v++) sum[k][v] += keys[k * key_row + i] * query[v];
    }
    float lanes[DOT_KEYS][DOT_VECTORS * LANES];
    memcpy(lanes, sum, sizeof sum);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = 0; k < count; k++) scores[row * score_row + k] = lanes[k][row] * scale;
}

/* acc[r] += the sum over keys of weights[r][k] * keys[k]: the lanes are columns. */
INLINE void sum_tile(const float *weights, const float *keys, int64_t key_row, int64_t count,
                     float *acc, int64_t acc_row, int fresh, const int rows) {
    vector sum[SUM_ROWS][SUM_VECTORS] = {0};
    for (int r = 0; r < rows && !fresh; r++)
        for (int v = 0; v < SUM_VECTORS; v++)
            sum[r][v] = *(const vector *)(acc + r * acc_row + v * LANES);
    for (int64_t k = 0; k < count; k++) {
        vector key[SUM_VECTORS];
        for (int v = 0; v < SUM_VECTORS; v++) {
            key[v] = *(const vector *)(keys + k * key_row + v * LANES);
            HOLD(key[v]);
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < SUM_VECTORS; v++) sum[r][v] += weights[r * count + k] * key[v];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < SUM_VECTORS; v++)
            *(vector *)(acc + r * acc_row + v * LANES) = sum[r][v];
}

/* All rows, with the sizes of a tile known to the compiler. */
static void dot_rows(const float *queries, int64_t query_row, const float *keys, int64_t key_row,
                     int64_t width, float scale, float *scores, int64_t score_row, int64_t rows,
                     int64_t count, const char *const *ahead, int64_t item) {
    for (int64_t row = 0; row < rows; row += DOT_VECTORS * LANES) {
        float *to = scores + row * score_row;
        int64_t left = rows - row;
        if (left <= LANES)
            dot_tile(queries + row, query_row, keys, key_row, width, scale, to, score_row, left,
                     count, ahead, item, 1);
        else
            dot_tile(queries + row, query_row, keys, key_row, width, scale, to, score_row,
                     left < 2 * LANES ? left : 2 * LANES, count, ahead, item, DOT_VECTORS);
    }
}

static void sum_rows(const float *weights, const float *keys, int64_t key_row, int64_t count,
                     float *acc, int64_t acc_row, int fresh, int64_t rows) {
    for (int64_t row = 0; row < rows; row += SUM_ROWS) {
        const float *from = weights + row * count;
        float *to = acc + row * acc_row;
        switch (rows - row) {
            case 1: sum_tile(from, keys, key_row, count, to, acc_row, fresh, 1); break;
            case 2: sum_tile(from, keys, key_row, count, to, acc_row, fresh, 2); break;
            case 3: sum_tile(from, keys, key_row, count, to, acc_row, fresh, 3); break;
            default: sum_tile(from, keys, key_row, count, to, acc_row, fresh, SUM_ROWS);
        }
    }
}

/* ---- attention --------------------------------------------------------------------------- */

typedef struct {
    const void *q_nope, *q_pe; /* [T, heads, L], [T, heads, R] */
    int64_t q_nope_token, q_nope_head, q_pe_token, q_pe_head;
    const void *latent, *rope; /* paged [blocks, block_size, .]; or rows [T, .] */
    int64_t latent_block, latent_entry, rope_block, rope_entry;
    const int32_t *table; /* [B, table_row]; NULL: keys are rows, those of this step, causal */
    int64_t table_row, num_blocks, block_size;
    const int32_t *key_lens, *query_lens;
    void *out;  /* [T, heads, L] contiguous */
    float *lse; /* [T, heads] contiguous */
    int64_t batch, tokens, heads, rank, rope_width, row_tile, key_tile;
    int64_t work; /* rows times keys, filled in here */
    float scale, cache_scale;
    int32_t dtype, cache_dtype, shares;
    char *workspace;
    sgemm_fn sgemm;
    bf16gemm_fn bf16gemm; /* NULL: multiply in FP32 */
    limit_fn limit;       /* NULL: not MKL */
} Attention;

/* Scratch of one share. With a BF16 product `queries`, `keys` and `weights` hold BF16. */
typedef struct {
    float *queries, *keys, *scores;
    uint16_t *weights;
    struct Partial {
        int64_t *unit; /* the unit it is a part of; -1: none */
        float *acc, *peak, *total;
    } partial[2]; /* a share begins and ends inside a unit at most once each */
} Scratch;

/* A unit: one tile of token rows of one sequence, and the keys it attends to. */
typedef struct {
    int64_t sequence, first_row, offset, tokens, keys;
} Unit;

static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static int64_t scratch_bytes(int64_t rows, int64_t rank, int64_t width, int64_t key_tile) {
    return aligned(4 * rows * width) + aligned(4 * key_tile * width) + 2 * aligned(8) +
           aligned(4 * rows * key_tile) + aligned(2 * rows * key_tile) +
           2 * (aligned(4 * rows * rank) + 2 * aligned(4 * rows));
}

int64_t anabranch_workspace_bytes(int64_t rows, int64_t rank, int64_t width, int64_t key_tile,
                                  int64_t shares) {
    return shares * scratch_bytes(rows, rank, width, key_tile) + 64;
}

static void *carve(char **from, int64_t bytes) {
    void *here = *from;
    *from += aligned(bytes);
    return here;
}

static Scratch scratch_of(const Attention *a, int64_t share) {
    int64_t rows = a->row_tile, width = a->rank + a->rope_width;
    char *at = (char *)aligned((int64_t)a->workspace) +
               share * scratch_bytes(rows, a->rank, width, a->key_tile);
    Scratch s;
    s.queries = carve(&at, 4 * rows * width);
    s.keys = carve(&at, 4 * a->key_tile * width);
    s.scores = carve(&at, 4 * rows * a->key_tile);
    s.weights = carve(&at, 2 * rows * a->key_tile);
    for (int i = 0; i < 2; i++) {
        s.partial[i].unit = carve(&at, 8);
        s.partial[i].acc = carve(&at, 4 * rows * a->rank);
        s.partial[i].peak = carve(&at, 4 * rows);
        s.partial[i].total = carve(&at, 4 * rows);
    }
    return s;
}

/* The unit after `unit`, in sequence and row order; `sequence == batch` at the end. */
static void next_unit(const Attention *a, Unit *unit) {
    int64_t most = a->row_tile / a->heads;
    unit->first_row += unit->tokens;
    unit->offset += unit->tokens;
    while (unit->sequence < a->batch && unit->offset >= a->query_lens[unit->sequence]) {
        unit->sequence++;
        unit->offset = 0;
    }
    if (unit->sequence == a->batch) return;
    int64_t left = a->query_lens[unit->sequence] - unit->offset;
    unit->tokens = left < most ? left : most;
    unit->keys = a->table ? a->key_lens[unit->sequence] : unit->offset + unit->tokens;
}

static const char *at(const void *base, int64_t offset, int dtype) {
    return (const char *)base + offset * ITEM[dtype];
}

static void load_queries(const Attention *a, const Unit *unit, float *queries) {
    int64_t width = a->rank + a->rope_width, item = ITEM[a->dtype];
    for (int64_t t = 0; t < unit->tokens; t++)
        for (int64_t h = 0; h < a->heads; h++) {
            int64_t row = unit->first_row + t;
            const char *nope =
                at(a->q_nope, row * a->q_nope_token + h * a->q_nope_head, a->dtype);
            const char *pe = at(a->q_pe, row * a->q_pe_token + h * a->q_pe_head, a->dtype);
            int64_t to = (t * a->heads + h) * width;
            if (a->bf16gemm) {
                memcpy((uint16_t *)queries + to, nope, a->rank * item);
                memcpy((uint16_t *)queries + to + a->rank, pe, a->rope_width * item);
            } else {
                load_row(queries + to, nope, a->rank, a->dtype, 1);
                load_row(queries + to + a->rank, pe, a->rope_width, a->dtype, 1);
            }
        }
}

/* Where a key's latent and rope columns lie. */
static void find_key(const Attention *a, const Unit *unit, int64_t key, const char **latent,
                     const char **rope) {
    int64_t block = 0, entry = unit->first_row - unit->offset + key;
    if (a->table) {
        block = a->table[unit->sequence * a->table_row + key / a->block_size];
        entry = key % a->block_size;
    }
    *latent = at(a->latent, block * a->latent_block + entry * a->latent_entry, a->cache_dtype);
    *rope = at(a->rope, block * a->rope_block + entry * a->rope_entry, a->cache_dtype);
}

static void load_keys(const Attention *a, const Unit *unit, int64_t first, int64_t count,
                      float *keys, int64_t key_row) {
    int64_t item = ITEM[a->cache_dtype];
    for (int64_t k = 0; k < count; k++) {
        const char *latent, *rope;
        find_key(a, unit, first + k, &latent, &rope);
        if (a->bf16gemm) {
            uint16_t *to = (uint16_t *)keys + k * key_row;
            memcpy(to, latent, a->rank * item);
            memcpy(to + a->rank, rope, a->rope_width * item);
        } else {
            float *to = keys + k * key_row;
            load_row(to, latent, a->rank, a->cache_dtype, a->cache_scale);
            load_row(to + a->rank, rope, a->rope_width, a->cache_dtype, a->cache_scale);
        }
    }
}

/* Online softmax of one tile: scores become weights, and what was accumulated decays. */
static void soften(const Attention *a, const Unit *unit, int64_t first, int64_t count, Scratch *s,
                   struct Partial *p, int fresh) {
    int64_t rows = unit->tokens * a->heads;
    for (int64_t row = 0; row < rows; row++) {
        float *scores = s->scores + row * count, *acc = p->acc + row * a->rank;
        int64_t seen = count;
        if (!a->table) { /* causal: a token sees the keys up to its own */
            int64_t own = unit->offset + row / a->heads + 1 - first;
            seen = own < count ? (own > 0 ? own : 0) : count;
        }
        float peak = fresh ? -INFINITY : p->peak[row], higher = peak, sum = 0;
#pragma omp simd reduction(max : higher)
        for (int64_t i = 0; i < seen; i++) higher = scores[i] > higher ? scores[i] : higher;
        if (seen > 0 && higher == -INFINITY) higher = NAN; /* no score is a number: say so */
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < seen; i++) {
            scores[i] = exp_negative(scores[i] - higher);
            sum += scores[i];
        }
        memset(scores + seen, 0, (count - seen) * 4);
        float decay = higher == -INFINITY ? 1 : expf(peak - higher);
        if (!fresh && decay != 1)
            for (int64_t i = 0; i < a->rank; i++) acc[i] *= decay;
        p->total[row] = (fresh ? 0 : p->total[row] * decay) + sum;
        p->peak[row] = higher;
        if (a->bf16gemm) store_row(s->weights + row * count, scores, count, BF16, 1);
    }
}

/* `attend` for few rows, in the tiles above. */
static void attend_few(const Attention *a, const Unit *unit, int64_t first, int64_t last,
                       Scratch *s, struct Partial *p) {
    int64_t rows = unit->tokens * a->heads, rank = a->rank, width = a->rank + a->rope_width;
    int64_t key_row = ((width + 15) / 16 | 1) * 16; /* an odd number of lines: all cache sets */
    int64_t query_row = (rows + LANES - 1) / LANES * LANES;
    float *queries = s->keys + FEW_KEYS * key_row; /* transposed; there is room for a->key_tile */
    memset(queries, 0, 4 * width * query_row);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < width; i++)
            queries[i * query_row + row] = s->queries[row * width + i];
    for (int64_t key = first; key < last; key += FEW_KEYS) {
        int64_t count = last - key < FEW_KEYS ? last - key : FEW_KEYS;
        load_keys(a, unit, key, count, s->keys, key_row);
        for (int64_t k = 0; k < count; k += DOT_KEYS) {
            const char *ahead[DOT_KEYS], *rope;
            for (int64_t i = 0; i < DOT_KEYS; i++) {
                int64_t next = key + count + k + i;
                find_key(a, unit, next < last ? next : last - 1, &ahead[i], &rope);
            }
            dot_rows(queries, query_row, s->keys + k * key_row, key_row, width, a->scale,
                     s->scores + k, count, rows, count - k < DOT_KEYS ? count - k : DOT_KEYS,
                     ahead, ITEM[a->cache_dtype]);
        }
        soften(a, unit, key, count, s, p, key == first);
        for (int64_t column = 0; column < rank; column += SUM_VECTORS * LANES)
            sum_rows(s->scores, s->keys + column, key_row, count, p->acc + column, rank,
                     key == first, rows);
    }
}

/* Keys [first, last) of a unit into a partial result: acc is the weighted sum, not divided. */
static void attend(const Attention *a, const Unit *unit, int64_t first, int64_t last, Scratch *s,
                   struct Partial *p) {
    int rows = (int)(unit->tokens * a->heads), rank = (int)a->rank;
    int width = (int)(a->rank + a->rope_width);
    load_queries(a, unit, s->queries);
    if (rows <= FEW_ROWS && !a->bf16gemm && rank % (SUM_VECTORS * LANES) == 0) {
        attend_few(a, unit, first, last, s, p);
        return;
    }
    for (int64_t key = first; key < last; key += a->key_tile) {
        int count = (int)(last - key < a->key_tile ? last - key : a->key_tile);
        int fresh = key == first;
        float zero = 0, one = 1, keep = fresh ? 0 : 1;
        load_keys(a, unit, key, count, s->keys, width);
        if (a->bf16gemm) { /* 101: row-major; 111, 112: as is, transposed */
            a->bf16gemm(101, 111, 112, rows, count, width, a->scale, (uint16_t *)s->queries,
                        width, (uint16_t *)s->keys, width, 0, s->scores, count);
            soften(a, unit, key, count, s, p, fresh);
            a->bf16gemm(101, 111, 111, rows, rank, count, 1, s->weights, count,
                        (uint16_t *)s->keys, width, keep, p->acc, rank);
        } else { /* column-major: the products are written transposed */
            a->sgemm("T", "N", &count, &rows, &width, &a->scale, s->keys, &width, s->queries,
                     &width, &zero, s->scores, &count);
            soften(a, unit, key, count, s, p, fresh);
            a->sgemm("N", "N", &rank, &rows, &count, &one, s->keys, &width, s->scores, &count,
                     &keep, p->acc, &rank);
        }
    }
}

/* Divide and store. A row that saw no key gets output 0, LSE -inf. */
static void finish(const Attention *a, const Unit *unit, const struct Partial *p) {
    for (int64_t row = 0; row < unit->tokens * a->heads; row++) {
        int64_t to = unit->first_row * a->heads + row;
        float total = p->total[row];
        char *out = (char *)a->out + to * a->rank * ITEM[a->dtype];
        if (total == 0)
            memset(out, 0, a->rank * ITEM[a->dtype]);
        else
            store_row(out, p->acc + row * a->rank, a->rank, a->dtype, 1 / total);
        a->lse[to] = total == 0 ? -INFINITY : p->peak[row] + logf(total);
    }
}

static void clear_rows(const Attention *a, int64_t first, int64_t last) {
    int64_t rows = (last - first) * a->heads;
    memset((char *)a->out + first * a->heads * a->rank * ITEM[a->dtype], 0,
           rows * a->rank * ITEM[a->dtype]);
    for (int64_t row = 0; row < rows; row++) a->lse[first * a->heads + row] = -INFINITY;
}

/* Add partial `from` of the same unit to `into`. */
static void add_partial(const Attention *a, const Unit *unit, struct Partial *into,
                        const struct Partial *from) {
    for (int64_t row = 0; row < unit->tokens * a->heads; row++) {
        if (from->total[row] == 0) continue;
        float peak = fmaxf(into->peak[row], from->peak[row]);
        float mine = into->total[row] == 0 ? 0 : expf(into->peak[row] - peak);
        float theirs = expf(from->peak[row] - peak);
        float *acc = into->acc + row * a->rank;
        const float *other = from->acc + row * a->rank;
        if (mine == 0)
            for (int64_t i = 0; i < a->rank; i++) acc[i] = other[i] * theirs;
        else
            for (int64_t i = 0; i < a->rank; i++) acc[i] = acc[i] * mine + other[i] * theirs;
        into->total[row] = into->total[row] * mine + from->total[row] * theirs;
        into->peak[row] = peak;
    }
}

/* Both kinds of partial attention. The rows times keys of all units are cut into equal shares, so
 * a unit may be in several; their partials are merged at the end. */
enum { SHARE_FLOPS = 10000000 }; /* what takes long enough to be worth another thread */

/* Check the block table and lower a->shares to what the work is worth. Returns as below. */
static int64_t begin_attention(Attention *a) {
    if (a->table)
        for (int64_t b = 0; b < a->batch; b++)
            for (int64_t i = 0; i * a->block_size < a->key_lens[b]; i++) {
                int32_t block = a->table[b * a->table_row + i];
                if (i >= a->table_row || block < 0 || block >= a->num_blocks) return 1 + b;
            }
    Unit unit = {0, 0, 0, 0, 0};
    a->work = 0;
    for (next_unit(a, &unit); unit.sequence < a->batch; next_unit(a, &unit))
        a->work += unit.tokens * unit.keys;
    double flops = 2.0 * a->work * a->heads * (2 * a->rank + a->rope_width);
    if (flops / SHARE_FLOPS < a->shares) a->shares = 1 + (int32_t)(flops / SHARE_FLOPS);
    for (int64_t share = 0; share < a->shares; share++)
        for (int i = 0; i < 2; i++) *scratch_of(a, share).partial[i].unit = -1;
    return 0;
}

static void attention_share(const void *task, int64_t share) {
    const Attention *a = task;
    Limits before = one_thread(a->limit);
    Scratch s = scratch_of(a, share);
    int64_t begin = a->work * share / a->shares, end = a->work * (share + 1) / a->shares;
    int64_t done = 0, index = 0;
    int partials = 0;
    Unit u = {0, 0, 0, 0, 0};
    for (next_unit(a, &u); u.sequence < a->batch; next_unit(a, &u), index++) {
        int64_t size = u.tokens * u.keys;
        /* Shares are cut at whole keys, the same key for the two that meet there. */
        int64_t first = begin <= done ? 0 : (begin - done) / u.tokens;
        int64_t last = end >= done + size ? u.keys : (end - done) / u.tokens;
        if (!a->table) { /* the bits of current attention must not depend on the shares */
            first = 0;
            last = begin <= done && done < end ? u.keys : 0;
        }
        if (done < end && done + size > begin && first < last) {
            struct Partial *p = &s.partial[partials];
            attend(a, &u, first, last, &s, p);
            if (first == 0 && last == u.keys) {
                finish(a, &u, p);
            } else {
                *p->unit = index;
                partials++;
            }
        }
        done += size;
    }
    restore(a->limit, before);
}

static void end_attention(const Attention *a) {
    int64_t index = 0, rows = 0;
    Unit u = {0, 0, 0, 0, 0};
    for (next_unit(a, &u); u.sequence < a->batch; next_unit(a, &u), index++) {
        struct Partial into = {0};
        for (int64_t share = 0; share < a->shares; share++) {
            Scratch s = scratch_of(a, share);
            for (int i = 0; i < 2; i++) {
                if (*s.partial[i].unit != index) continue;
                if (into.acc)
                    add_partial(a, &u, &into, &s.partial[i]);
                else
                    into = s.partial[i];
            }
        }
        if (into.acc) finish(a, &u, &into);
        if (u.keys == 0) clear_rows(a, u.first_row, u.first_row + u.tokens);
        rows = u.first_row + u.tokens;
    }
    clear_rows(a, rows, a->tokens);
}

/* Returns 0, or 1 + the sequence whose block table leads outside the cache. */
int64_t anabranch_attention(Attention *a) {
    int64_t lost = begin_attention(a);
    if (lost) return lost;
    in_shares(attention_share, a, a->shares);
    end_attention(a);
    return 0;
}

/* ---- pack, merge, cache ------------------------------------------------------------------ */

/* out [T, N*H, D], lse [T, N*H] to packed [N, T, H, D + c]: the LSE's bits in the last columns. */
void anabranch_pack(const char *out, const float *lse, char *packed, int64_t ranks,
                    int64_t tokens, int64_t heads, int64_t row_bytes) {
    for (int64_t n = 0; n < ranks; n++)
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t h = 0; h < heads; h++) {
                int64_t from = (t * ranks + n) * heads + h;
                memcpy(packed, out + from * row_bytes, row_bytes);
                memcpy(packed + row_bytes, lse + from, 4);
                packed += row_bytes + 4;
            }
}

/* Rows of kv_c and k_pe to their slots; a negative slot is another rank's. Same dtype throughout,
 * strides in bytes. Returns 0, or 1 + the row whose slot lies outside the cache. */
int64_t anabranch_store(const char *kv_c, int64_t kv_c_row, const char *k_pe, int64_t k_pe_row,
                        const int64_t *slots, int64_t tokens, int64_t num_blocks,
                        int64_t block_size, char *latent, int64_t latent_block,
                        int64_t latent_entry, int64_t latent_bytes, char *rope,
                        int64_t rope_block, int64_t rope_entry, int64_t rope_bytes) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] >= num_blocks * block_size) return 1 + t;
    for (int64_t t = 0; t < tokens; t++) {
        if (slots[t] < 0) continue;
        int64_t block = slots[t] / block_size, entry = slots[t] % block_size;
        memcpy(latent + block * latent_block + entry * latent_entry, kv_c + t * kv_c_row,
               latent_bytes);
        memcpy(rope + block * rope_block + entry * rope_entry, k_pe + t * k_pe_row, rope_bytes);
    }
    return 0;
}

/* Merge `parts` partials of T*H rows. Row r of partial n is at outs[n] + r * row[n] elements of
 * dtypes[n], its LSE at lses[n] + r * lse_row[n] bytes. */
typedef struct {
    const char **outs;
    const int64_t *row;
    const int32_t *dtypes;
    const char **lses;
    const int64_t *lse_row;
    int64_t parts, rows, width;
    char *out;
    int32_t dtype;
    float *lse;
    int64_t shares;
} Merge;

enum { SHARE_ELEMENTS = 65536 };

static void merge_share(const void *task, int64_t share) {
    const Merge *m = task;
    int64_t parts = m->parts, width = m->width;
    for (int64_t r = m->rows * share / m->shares; r < m->rows * (share + 1) / m->shares; r++) {
        float weights[parts], peak = -INFINITY, total = 0, acc[width], values[width];
        for (int64_t n = 0; n < parts; n++) {
            float log;
            memcpy(&log, m->lses[n] + r * m->lse_row[n], 4);
            weights[n] = isfinite(log) ? log : -INFINITY;
            peak = weights[n] > peak ? weights[n] : peak;
        }
        for (int64_t n = 0; n < parts; n++) {
            weights[n] = weights[n] > -INFINITY ? expf(weights[n] - peak) : 0;
            total += weights[n];
        }
        memset(acc, 0, width * 4);
        for (int64_t n = 0; n < parts; n++) {
            float weight = total > 0 ? weights[n] / total : 0;
            if (weight == 0) continue; /* whatever the payload holds, it is not read */
            int32_t dtype = m->dtypes[n];
            load_row(values, at(m->outs[n], r * m->row[n], dtype), width, dtype, 1);
            for (int64_t i = 0; i < width; i++) acc[i] += weight * values[i];
        }
        store_row(m->out + r * width * ITEM[m->dtype], acc, width, m->dtype, 1);
        m->lse[r] = total > 0 ? peak + logf(total) : -INFINITY;
    }
}

void anabranch_merge(const char **outs, const int64_t *row, const int32_t *dtypes,
                     const char **lses, const int64_t *lse_row, int64_t parts, int64_t rows,
                     int64_t width, char *out, int32_t dtype, float *lse, int64_t threads) {
    int64_t worth = 1 + rows * width * parts / SHARE_ELEMENTS;
    Merge task = {outs, row, dtypes, lses, lse_row, parts, rows, width, out, dtype, lse,
                  threads < worth ? threads : worth};
    in_shares(merge_share, &task, task.shares);
}

/* ---- V-up -------------------------------------------------------------------------------- */

enum { V_UP_TILE = 256, V_UP_FEW = 4 };

int64_t anabranch_v_up_bytes(int64_t rank, int64_t width, int64_t shares) {
    return 4 * shares * (V_UP_TILE * (rank + width) + rank * width);
}

/* x [T, H, L] times w [H, L, V] to out [T, H, V], one head at a time. Each head's rows and weights
 * pass through scratch, so the bits depend on neither strides nor shares. */
typedef struct {
    const void *x;
    int64_t x_token, x_head;
    const void *w;
    int64_t w_head, w_row;
    char *out;
    int64_t out_token, out_head, tokens, heads, rank, width;
    int32_t dtype;
    int64_t shares;
    float *workspace;
    sgemm_fn sgemm;
    limit_fn limit;
} VUp;

static void v_up_share(const void *task, int64_t share) {
    const VUp *p = task;
    int64_t rank = p->rank, width = p->width, tokens = p->tokens;
    int32_t dtype = p->dtype;
    Limits before = one_thread(p->limit);
    float *weights = p->workspace + share * (V_UP_TILE * (rank + width) + rank * width);
    float *rows = weights + rank * width, *result = rows + V_UP_TILE * rank;
    for (int64_t h = p->heads * share / p->shares; h < p->heads * (share + 1) / p->shares; h++) {
        const float *factors = weights;
        int l = (int)rank, v = (int)width, w_stride = v;
        if (dtype == F32) { /* no copy: both forms of V-up have the same weights */
            factors = (const float *)p->w + h * p->w_head;
            w_stride = (int)p->w_row;
        } else if (tokens > V_UP_FEW)
            for (int64_t k = 0; k < rank; k++)
                load_row(weights + k * width, at(p->w, h * p->w_head + k * p->w_row, dtype),
                         width, dtype, 1);
        for (int64_t first = 0; first < tokens; first += V_UP_TILE) {
            int count = (int)(tokens - first < V_UP_TILE ? tokens - first : V_UP_TILE);
            for (int64_t i = 0; i < count; i++)
                load_row(rows + i * rank,
                         at(p->x, (first + i) * p->x_token + h * p->x_head, dtype), rank, dtype, 1);
            if (tokens > V_UP_FEW) {
                float one = 1, zero = 0;
                p->sgemm("N", "N", &v, &count, &l, &one, factors, &w_stride, rows, &l, &zero,
                         result, &v);
            } else { /* few rows: each weight is read once, from where it is */
                memset(result, 0, count * width * 4);
                for (int64_t k = 0; k < rank; k++) {
                    load_row(weights, at(p->w, h * p->w_head + k * p->w_row, dtype), width, dtype,
                             1);
                    for (int64_t i = 0; i < count; i++) {
                        float factor = rows[i * rank + k], *to = result + i * width;
                        for (int64_t j = 0; j < width; j++) to[j] += factor * weights[j];
                    }
                }
            }
            for (int64_t i = 0; i < count; i++)
                store_row(p->out + ((first + i) * p->out_token + h * p->out_head) * ITEM[dtype],
                          result + i * width, width, dtype, 1);
        }
    }
    restore(p->limit, before);
}

void anabranch_v_up(const void *x, int64_t x_token, int64_t x_head, const void *w,
                    int64_t w_head, int64_t w_row, char *out, int64_t out_token,
                    int64_t out_head, int64_t tokens, int64_t heads, int64_t rank,
                    int64_t width, int32_t dtype, int64_t threads, float *workspace,
                    sgemm_fn sgemm, limit_fn limit) {
    double worth = 1 + 2.0 * tokens * heads * rank * width / SHARE_FLOPS;
    int64_t shares = threads < heads ? threads : heads;
    VUp task = {x, x_token, x_head, w, w_head, w_row, out, out_token, out_head, tokens, heads,
                rank, width, dtype, worth < shares ? (int64_t)worth : shares, workspace, sgemm,
                limit};
    in_shares(v_up_share, &task, task.shares);
}

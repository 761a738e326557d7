/* Attention of many new tokens over a paged bfloat16 cache, with AVX512-BF16 dot products.
 *
 * A task is one kv head of one piece of a segment: all its rows (query, head of the group) walk together
 * over blocks of BLOCK slots that lie on a fixed grid over the stream. A block's keys and values are packed
 * into pairs once and serve all rows; scores and sums are float32, weights are rounded to bfloat16 before they
 * meet the values. A row's arithmetic does not depend on its neighbours.
 *
 * Source of the running softmax: FlashAttention, arXiv:2205.14135.
 * Nothing here checks its arguments; paged.py does, once a plan.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 64 /* slots that are packed together */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define IS_BUILT 1
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

typedef struct {
    const int32_t *qo_lens, *qo_starts, *kv_lens, *segments, *ahead, *page_table;
    int64_t max_pages, page_size, num_qo_heads, num_kv_heads, head_dim, window; /* window 0: none */
    float scale, soft_cap;                                                      /* soft_cap 0: none */
    const uint16_t *query, *keys, *values;
    uint16_t *out;
} Job;

#define INLINE static inline __attribute__((always_inline))

/* exp(x) for x <= 0, to about one unit in the last place; 0 for -inf. Source: Cephes, expf. */
INLINE __m512 exp16(__m512 x)
{
    __mmask16 is_zero = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(1.9875691500e-4f), _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps((__mmask16)~is_zero, p, n);
}

INLINE __m512 tanh16(__m512 x)
{
    __m512 size = _mm512_abs_ps(x), one = _mm512_set1_ps(1.0f);
    __m512 e = exp16(_mm512_mul_ps(size, _mm512_set1_ps(-2.0f)));
    __m512 y = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    return _mm512_mask_sub_ps(y, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), _mm512_setzero_ps(), y);
}

/* Pairs of neighbouring elements of a key: packed[pair][slot]. Pairs of slots of the values: packed[pair][d]. */
static void pack(const Job *job, const int32_t *pages, int64_t head, int64_t first, int64_t last, uint32_t *keys,
                 uint32_t *values)
{
    int64_t dim = job->head_dim, stride = job->num_kv_heads * dim, count = last - first;
    const uint16_t *row[BLOCK];
    for (int64_t s = 0; s < count; s++) {
        int64_t slot = first + s;
        int64_t at = ((int64_t)pages[slot / job->page_size] * job->page_size + slot % job->page_size) * stride + head * dim;
        const uint32_t *key = (const uint32_t *)(job->keys + at);
        row[s] = job->values + at;
        for (int64_t i = 0; i < dim / 2; i++)
            keys[i * BLOCK + s] = key[i];
    }
    for (int64_t s = count; s < BLOCK; s++)
        for (int64_t i = 0; i < dim / 2; i++)
            keys[i * BLOCK + s] = 0;
    for (int64_t s = 0; s < BLOCK; s += 2)
        for (int64_t d = 0; d < dim; d += 16) {
            __m512i low = s < count ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(row[s] + d))) : _mm512_setzero_si512();
            __m512i high = s + 1 < count ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(row[s + 1] + d)))
                                         : _mm512_setzero_si512();
            _mm512_storeu_si512(values + s / 2 * dim + d, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
}

/* scores[r][slot] of 8 rows with a packed block */
INLINE void scores8(const uint32_t *const *query, const uint32_t *keys, int64_t pairs, float *scores)
{
    for (int64_t s = 0; s < BLOCK; s += 32) {
        __m512 sum[8][2];
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++)
            sum[r][0] = sum[r][1] = _mm512_setzero_ps();
        for (int64_t i = 0; i < pairs; i++) {
            __m512bh k0 = (__m512bh)_mm512_loadu_si512(keys + i * BLOCK + s);
            __m512bh k1 = (__m512bh)_mm512_loadu_si512(keys + i * BLOCK + s + 16);
#pragma GCC unroll 8
            for (int r = 0; r < 8; r++) {
                __m512bh q = (__m512bh)_mm512_set1_epi32((int)query[r][i]);
                sum[r][0] = _mm512_dpbf16_ps(sum[r][0], q, k0);
                sum[r][1] = _mm512_dpbf16_ps(sum[r][1], q, k1);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) {
            _mm512_storeu_ps(scores + r * BLOCK + s, sum[r][0]);
            _mm512_storeu_ps(scores + r * BLOCK + s + 16, sum[r][1]);
        }
    }
}

/* sums[r][d] += weights[r][slot] * values[slot][d] for 8 rows and 32 elements from d on */
INLINE void values8(const uint32_t *weights, const uint32_t *values, int64_t dim, int64_t d, float *sums)
{
    __m512 sum[8][2];
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) {
        sum[r][0] = _mm512_loadu_ps(sums + r * dim + d);
        sum[r][1] = _mm512_loadu_ps(sums + r * dim + d + 16);
    }
    for (int64_t i = 0; i < BLOCK / 2; i++) {
        __m512bh v0 = (__m512bh)_mm512_loadu_si512(values + i * dim + d);
        __m512bh v1 = (__m512bh)_mm512_loadu_si512(values + i * dim + d + 16);
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) {
            __m512bh w = (__m512bh)_mm512_set1_epi32((int)weights[r * (BLOCK / 2) + i]);
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], w, v0);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], w, v1);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) {
        _mm512_storeu_ps(sums + r * dim + d, sum[r][0]);
        _mm512_storeu_ps(sums + r * dim + d + 16, sum[r][1]);
    }
}

/* One row's scores with the slots [from, to) of a block to weights; updates the row's maximum, sum and output. */
INLINE void soften(const Job *job, float *scores, uint32_t *weights, int64_t from, int64_t to, float *max, float *total,
                   float *sums)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 x[BLOCK / 16], top = _mm512_set1_ps(-INFINITY), all = _mm512_setzero_ps();
    for (int i = 0; i < BLOCK / 16; i++) {
        x[i] = _mm512_mul_ps(_mm512_loadu_ps(scores + 16 * i), _mm512_set1_ps(job->scale));
        if (job->soft_cap > 0)
            x[i] = _mm512_mul_ps(tanh16(_mm512_div_ps(x[i], _mm512_set1_ps(job->soft_cap))), _mm512_set1_ps(job->soft_cap));
        __m512i at = _mm512_add_epi32(lane, _mm512_set1_epi32(16 * i));
        __mmask16 seen = _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32((int)from)) &
                         _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32((int)to));
        x[i] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, x[i]);
        top = _mm512_max_ps(top, x[i]);
    }
    float m = _mm512_reduce_max_ps(top);
    if (m > *max) {
        if (*total > 0) {
            float factor = _mm512_cvtss_f32(exp16(_mm512_set1_ps(*max - m)));
            *total *= factor;
            for (int64_t d = 0; d < job->head_dim; d += 16)
                _mm512_storeu_ps(sums + d, _mm512_mul_ps(_mm512_loadu_ps(sums + d), _mm512_set1_ps(factor)));
        }
        *max = m;
    }
    if (*max == -INFINITY) {
        memset(weights, 0, BLOCK * 2);
        return;
    }
    for (int i = 0; i < BLOCK / 16; i++) {
        __m512 e = exp16(_mm512_sub_ps(x[i], _mm512_set1_ps(*max)));
        all = _mm512_add_ps(all, e);
        _mm256_storeu_si256((void *)((uint16_t *)weights + 16 * i), (__m256i)_mm512_cvtneps_pbh(e));
    }
    *total += _mm512_reduce_add_ps(all);
}

static void run_task(const Job *job, int64_t piece, int64_t head, char *scratch)
{
    int64_t dim = job->head_dim, group = job->num_qo_heads / job->num_kv_heads, qo_len = job->qo_lens[piece];
    int64_t rows = qo_len * group, padded = (rows + 7) / 8 * 8, ahead = job->ahead[piece];
    int64_t kv_len = job->kv_lens[piece] + (ahead > 0 ? ahead : 0), before = job->kv_lens[piece] - qo_len;
    const int32_t *pages = job->page_table + job->segments[piece] * job->max_pages;
    uint32_t *keys = (uint32_t *)scratch, *values = keys + dim / 2 * BLOCK;
    float *scores = (float *)(values + BLOCK / 2 * dim), *sums = scores + 8 * BLOCK;
    uint32_t *weights = (uint32_t *)(sums + padded * dim);
    float *max = (float *)(weights + 8 * BLOCK / 2), *total = max + padded;
    const uint32_t **query = (const uint32_t **)(total + padded);
    for (int64_t r = 0; r < padded; r++) {
        int64_t own = r < rows ? r : rows - 1;
        query[r] = (const uint32_t *)(job->query +
                                      ((job->qo_starts[piece] + own / group) * job->num_qo_heads + head * group + own % group) * dim);
        max[r] = -INFINITY;
        total[r] = 0;
    }
    memset(sums, 0, sizeof(float) * padded * dim);
    int64_t begin = 0;
    if (job->window && before + 1 > job->window)
        begin = (before + 1 - job->window) / BLOCK * BLOCK;
    for (int64_t first = begin; first < kv_len; first += BLOCK) {
        int64_t last = first + BLOCK < kv_len ? first + BLOCK : kv_len;
        pack(job, pages, head, first, last, keys, values);
        for (int64_t r = 0; r < padded; r += 8) {
            scores8(query + r, keys, dim / 2, scores);
            for (int64_t i = 0; i < 8; i++) {
                int64_t upto = before + (r + i < rows ? r + i : rows - 1) / group + 1;
                int64_t from = job->window && upto > job->window ? upto - job->window : 0;
                int64_t to = ahead < 0 ? upto : kv_len;
                soften(job, scores + i * BLOCK, weights + i * (BLOCK / 2), from - first, to - first, max + r + i,
                       total + r + i, sums + (r + i) * dim);
            }
            for (int64_t d = 0; d < dim; d += 32)
                values8(weights, values, dim, d, sums + r * dim);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        uint16_t *out = job->out + ((const uint16_t *)query[r] - job->query);
        __m512 factor = _mm512_set1_ps(1.0f / total[r]);
        for (int64_t d = 0; d < dim; d += 16)
            _mm256_storeu_si256((void *)(out + d),
                                (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(sums + r * dim + d), factor)));
    }
}
#pragma GCC pop_options
#endif

/* attend(num_threads, num_pieces, max_rows, qo_lens, qo_starts, kv_lens, segments, ahead, page_table, max_pages,
 *        page_size, num_qo_heads, num_kv_heads, head_dim, window, query, keys, values, out, scale, soft_cap) */
static PyObject *attend(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
#ifdef IS_BUILT
    int64_t v[19];
    if (num_args != 21) {
        PyErr_Format(PyExc_TypeError, "attend takes 21 arguments, not %zd", num_args);
        return NULL;
    }
    for (int i = 0; i < 19; i++)
        v[i] = PyLong_AsLongLong(args[i]);
    Job job = {
        .qo_lens = (int32_t *)v[3], .qo_starts = (int32_t *)v[4], .kv_lens = (int32_t *)v[5],
        .segments = (int32_t *)v[6], .ahead = (int32_t *)v[7], .page_table = (int32_t *)v[8],
        .max_pages = v[9], .page_size = v[10], .num_qo_heads = v[11], .num_kv_heads = v[12], .head_dim = v[13],
        .window = v[14], .query = (void *)v[15], .keys = (void *)v[16], .values = (void *)v[17], .out = (void *)v[18],
        .scale = (float)PyFloat_AsDouble(args[19]), .soft_cap = (float)PyFloat_AsDouble(args[20]),
    };
    if (PyErr_Occurred())
        return NULL;
    int64_t padded = (v[2] * (v[11] / v[12]) + 7) / 8 * 8;
    size_t size = 4 * (job.head_dim * BLOCK + 8 * BLOCK + padded * job.head_dim + 4 * BLOCK + 2 * padded) + 8 * padded + 64;
    int64_t num_tasks = v[1] * job.num_kv_heads;
    int is_short_of_memory = 0;
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel num_threads((int)v[0]) if (num_tasks > 1)
    {
        char *scratch = malloc(size);
        if (!scratch) {
#pragma omp atomic write
            is_short_of_memory = 1;
        }
        /* The last pieces see the most slots: they go first, so that no thread ends long after the others. */
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = num_tasks - 1; i >= 0; i--)
            if (scratch)
                run_task(&job, i / job.num_kv_heads, i % job.num_kv_heads, scratch);
        free(scratch);
    }
    Py_END_ALLOW_THREADS
    if (is_short_of_memory)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
#else
    (void)args, (void)num_args;
    PyErr_SetString(PyExc_RuntimeError, "this kernel needs AVX512-BF16");
    return NULL;
#endif
}

static PyMethodDef methods[] = {
    {"attend", (PyCFunction)(void (*)(void))attend, METH_FASTCALL, "One layer's attention of long pieces; see paged.py."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_flash", "Attention of many new tokens over a paged cache.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__flash(void)
{
    int is_supported = 0;
#ifdef IS_BUILT
    __builtin_cpu_init();
    is_supported = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    PyObject *self = PyModule_Create(&module);
    if (self && PyModule_AddIntConstant(self, "IS_SUPPORTED", is_supported) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}

/* Attention over a paged KV cache, read in place.
 *
 * A piece is a run of new tokens of one segment; a task is one kv head of one chunk of CHUNK slots that a
 * piece sees. Chunks lie on a fixed grid over the stream's slots and hidden slots count as exact zeros, so a
 * row's arithmetic depends neither on its neighbours, nor on the cut into pieces, nor on the threads.
 * A task does two passes over its chunk (scores, then weighted values) and leaves a partial result per row;
 * partial results of a row are merged in the chunks' order once all tasks are done.
 *
 * The part below SECOND PART is compiled once per instruction set: the file includes itself.
 * Nothing here checks its arguments; paged.py does, once a plan.
 */
#ifndef LANES
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define CHUNK 128 /* slots of one task; a multiple of 16 */
#define ROWS 4    /* rows (query, head of the group) that share one read of keys and values */
#define PAD 16    /* floats behind a partial row: its maximum, its sum, and room to stay aligned */
#define AHEAD 16  /* slots between reading keys and asking for them; a divisor of CHUNK */
/* Into the second level: the first one has too few lines in flight to keep up with memory. */
#define PREFETCH(base, i) __builtin_prefetch((const char *)(base) + (i) * (is_half ? 2 : 4), 0, 2)
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const void *query, *keys, *values;
    void *out;
    float *partial;              /* [partial rows, head_dim + PAD] */
    const int64_t *chunk_indptr; /* [num_pieces + 1]: a piece's first chunk among all */
    const int64_t *row_indptr;   /* [num_pieces]: a piece's first partial row */
    const int32_t *first_chunk;  /* [num_pieces]: number of a piece's first chunk in its stream */
    const int32_t *qo_lens;      /* [num_pieces]: new tokens */
    const int32_t *qo_starts;    /* [num_pieces]: the first of them among all of the step */
    const int32_t *kv_lens;      /* [num_pieces]: slots up to the piece's last token */
    const int32_t *segments;     /* [num_pieces]: row of the page table */
    const int32_t *ahead;        /* [num_pieces]: slots behind those, which all of it sees; -1: it is causal */
    const int32_t *page_table;   /* [*, max_pages] */
    int64_t num_pieces, max_pages, page_size, num_qo_heads, num_kv_heads, head_dim;
    int64_t window; /* 0: none */
    int64_t is_bfloat16;
    float scale, soft_cap; /* soft_cap 0: none */
} Job;

/* Slots [first, last) that query `j` of piece `i` sees. */
INLINE void visible(const Job *job, int64_t i, int64_t j, int64_t *first, int64_t *last)
{
    int64_t upto = job->kv_lens[i] - (job->qo_lens[i] - 1 - j); /* its own included */
    *first = job->window && upto > job->window ? upto - job->window : 0;
    *last = job->ahead[i] < 0 ? upto : job->kv_lens[i] + job->ahead[i];
}

#define LANES 8
#define WIDEN(x, type) __builtin_convertvector(x, type)
#define NAME(x) x##_generic
#include "_paged.c"
#undef NAME
#undef WIDEN

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_TARGETS 1
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define WIDEN(x, type) (type) _mm256_cvtepu16_epi32((__m128i)(x))
#define NAME(x) x##_avx2
#include "_paged.c"
#undef NAME
#pragma GCC pop_options
#undef LANES
#define LANES 16
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#undef WIDEN
#define WIDEN(x, type) (type) _mm512_cvtepu16_epi32((__m256i)(x))
#define NAME(x) x##_avx512
#include "_paged.c"
#undef NAME
#pragma GCC pop_options
#endif

/* Index: the level of the instruction set, as in the module's LEVEL, the best that this machine has. */
static void (*const tasks[])(const Job *, int64_t) = {task_generic,
#ifdef HAS_TARGETS
                                                      task_avx2, task_avx512
#endif
};
static void (*const merges[])(const Job *, int64_t) = {merge_generic,
#ifdef HAS_TARGETS
                                                       merge_avx2, merge_avx512
#endif
};

/* attend(level, num_threads, addresses..., sizes..., scale, soft_cap, query, keys, values, out) */
#define NUM_ARGS 26
#define SCALE 20
#define SOFT_CAP 21
static PyObject *attend(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    if (num_args != NUM_ARGS)
        return PyErr_Format(PyExc_TypeError, "attend takes %d arguments, not %zd", NUM_ARGS, num_args);
    int64_t v[NUM_ARGS];
    for (int i = 0; i < NUM_ARGS; i++)
        if (i != SCALE && i != SOFT_CAP)
            v[i] = PyLong_AsLongLong(args[i]);
    Job job = {
        .partial = (float *)v[2],
        .chunk_indptr = (int64_t *)v[3],
        .row_indptr = (int64_t *)v[4],
        .first_chunk = (int32_t *)v[5],
        .qo_lens = (int32_t *)v[6],
        .qo_starts = (int32_t *)v[7],
        .kv_lens = (int32_t *)v[8],
        .segments = (int32_t *)v[9],
        .ahead = (int32_t *)v[10],
        .page_table = (int32_t *)v[11],
        .num_pieces = v[12],
        .max_pages = v[13],
        .page_size = v[14],
        .num_qo_heads = v[15],
        .num_kv_heads = v[16],
        .head_dim = v[17],
        .window = v[18],
        .is_bfloat16 = v[19],
        .scale = (float)PyFloat_AsDouble(args[SCALE]),
        .soft_cap = (float)PyFloat_AsDouble(args[SOFT_CAP]),
        .query = (const void *)v[22],
        .keys = (const void *)v[23],
        .values = (const void *)v[24],
        .out = (void *)v[25],
    };
    if (PyErr_Occurred())
        return NULL;
    int num_threads = (int)v[1];
    void (*run_task)(const Job *, int64_t) = tasks[v[0]], (*run_merge)(const Job *, int64_t) = merges[v[0]];
    int64_t num_tasks = job.chunk_indptr[job.num_pieces] * job.num_kv_heads;
    int64_t num_merges = job.num_pieces * job.num_kv_heads;
    int64_t block = num_tasks < 4 * num_threads * job.num_kv_heads ? 1 : job.num_kv_heads;
    Py_BEGIN_ALLOW_THREADS
    if (num_threads < 2 || num_tasks < 2) {
        for (int64_t i = 0; i < num_tasks; i++)
            run_task(&job, i);
        for (int64_t i = 0; i < num_merges; i++)
            run_merge(&job, i);
    } else {
#pragma omp parallel num_threads(num_threads)
        {
#pragma omp for schedule(dynamic, block)
            for (int64_t i = 0; i < num_tasks; i++)
                run_task(&job, i);
#pragma omp for schedule(static) nowait
            for (int64_t i = 0; i < num_merges; i++)
                run_merge(&job, i);
        }
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"attend", (PyCFunction)(void (*)(void))attend, METH_FASTCALL, "One layer's attention; see paged.py."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_paged", "Attention over a paged KV cache, in place.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__paged(void)
{
    int level = 0;
#ifdef HAS_TARGETS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        level = 1;
    if (level && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        level = 2;
#endif
    PyObject *self = PyModule_Create(&module);
    if (self && (PyModule_AddIntConstant(self, "LEVEL", level) < 0 ||
                 PyModule_AddIntConstant(self, "CHUNK", CHUNK) < 0 || PyModule_AddIntConstant(self, "PAD", PAD) < 0)) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}

#else /* SECOND PART, once per instruction set: LANES floats a vector, NAME(x) the names */

typedef float NAME(vf) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(vi) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(vu) __attribute__((vector_size(4 * LANES)));
typedef uint16_t NAME(vh) __attribute__((vector_size(2 * LANES)));
#define vf NAME(vf)
#define vi NAME(vi)

INLINE vf NAME(load)(const void *base, int64_t i, int is_half)
{
    vf x;
    if (is_half) {
        NAME(vh) h;
        memcpy(&h, (const uint16_t *)base + i, sizeof h);
        return (vf)(WIDEN(h, NAME(vu)) << 16);
    }
    memcpy(&x, (const float *)base + i, sizeof x);
    return x;
}

INLINE void NAME(store)(void *base, int64_t i, vf x, int is_half)
{
    if (is_half) { /* round to nearest, ties to even; NaN stays NaN */
        NAME(vu) u = (NAME(vu))x;
        NAME(vu) rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
        NAME(vu) is_nan = (NAME(vu))(x != x);
        NAME(vh) h = __builtin_convertvector((rounded & ~is_nan) | (((u >> 16) | 0x40) & is_nan), NAME(vh));
        memcpy((uint16_t *)base + i, &h, sizeof h);
    } else {
        memcpy((float *)base + i, &x, sizeof x);
    }
}

INLINE vf NAME(select)(vi mask, vf x, vf y) { return (vf)(((vi)x & mask) | ((vi)y & ~mask)); }

/* exp(x) for x <= 0, to about one unit in the last place; never below 2**-126. Source: Cephes, expf. */
INLINE vf NAME(exp)(vf x)
{
    const vf low = (vf){0} - 87.0f, magic = (vf){0} + 12582912.0f; /* 1.5 * 2**23: adding it rounds */
    x = NAME(select)(x < low, low, x);
    vf t = x * 1.44269504f + magic, n = t - magic;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return (vf)((vi)p + (((vi)t - 0x4b400000) << 23));
}

/* LANES vectors to the vector of their sums, in order; every sum is formed in the same order. */
#if LANES == 16
#define ZIP(i, half)                                                                            \
    x[i] = __builtin_shufflevector(x[i], x[i + half], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, \
                                   6, 22, 7, 23) +                                              \
           __builtin_shufflevector(x[i], x[i + half], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, \
                                   29, 14, 30, 15, 31);
#else
#define ZIP(i, half)                                                              \
    x[i] = __builtin_shufflevector(x[i], x[i + half], 0, 8, 1, 9, 2, 10, 3, 11) + \
           __builtin_shufflevector(x[i], x[i + half], 4, 12, 5, 13, 6, 14, 7, 15);
#endif
INLINE vf NAME(sums)(vf *x)
{
#if LANES == 16
    ZIP(0, 8) ZIP(1, 8) ZIP(2, 8) ZIP(3, 8) ZIP(4, 8) ZIP(5, 8) ZIP(6, 8) ZIP(7, 8)
#endif
    ZIP(0, 4) ZIP(1, 4) ZIP(2, 4) ZIP(3, 4)
    ZIP(0, 2) ZIP(1, 2)
    ZIP(0, 1)
    return x[0];
}
#undef ZIP

/* Raw scores of `rows` queries with the slots [from, to) of a chunk, LANES / rows slots at a time. */
INLINE void NAME(scores)(const int rows, const int is_half, const float *query, const void *keys,
                         const void *values, const int64_t *offsets, int64_t head_dim, int64_t from, int64_t to,
                         float *scores)
{
    const int slots = rows == 1 ? LANES : rows == 2 ? LANES / 2 : LANES / 4;
    for (int64_t n = from / LANES * LANES; n < to; n += slots) {
        for (int s = 0; s < slots; s++)
            for (int64_t d = 0; d < head_dim; d += is_half ? 32 : 16) {
                PREFETCH(values, offsets[n + s] + d);
                PREFETCH(keys, offsets[n + s + (n + AHEAD < to ? AHEAD : 0)] + d);
            }
        vf sum[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            sum[i] = (vf){0};
        for (int64_t d = 0; d < head_dim; d += LANES) {
            vf q[ROWS];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                memcpy(&q[r], query + r * head_dim + d, sizeof(vf));
#pragma GCC unroll 16
            for (int s = 0; s < slots; s++) {
                vf k = NAME(load)(keys, offsets[n + s] + d, is_half);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++)
                    sum[r * slots + s] += q[r] * k;
            }
        }
        vf x = NAME(sums)(sum);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
            memcpy(scores + r * CHUNK + n, (float *)&x + r * slots, sizeof(float) * slots);
    }
}

/* Turns one row's raw scores into weights relative to their maximum; zero outside [from, to). */
INLINE void NAME(weights)(float *row, int64_t from, int64_t to, float scale, float cap, float *max, float *sum)
{
    int64_t begin = from / LANES * LANES;
    vf top = (vf){0} - INFINITY, total = {0};
    vi lane = {0};
    for (int i = 0; i < LANES; i++)
        lane[i] = i;
    for (int64_t n = begin; n < to; n += LANES) {
        vf x;
        memcpy(&x, row + n, sizeof x);
        x *= scale;
        if (cap > 0) {
            vf y = x / cap, size = NAME(select)(y < 0, -y, y), e = NAME(exp)(size * -2.0f);
            size = (1.0f - e) / (1.0f + e) * cap;
            x = NAME(select)(y < 0, -size, size);
        }
        vi at = lane + (int32_t)n;
        x = NAME(select)((at >= (int32_t)from) & (at < (int32_t)to), x, (vf){0} - INFINITY);
        top = NAME(select)(x > top, x, top);
        memcpy(row + n, &x, sizeof x);
    }
    float m = -INFINITY;
    for (int i = 0; i < LANES; i++)
        m = top[i] > m ? top[i] : m;
    for (int64_t n = begin; n < to; n += LANES) {
        vf x;
        memcpy(&x, row + n, sizeof x);
        vf e = NAME(exp)(x - m);
        e = NAME(select)(x == -INFINITY, (vf){0}, e);
        total += e;
        memcpy(row + n, &e, sizeof e);
    }
    float all = 0;
    for (int i = 0; i < LANES; i++)
        all += total[i];
    *max = m;
    *sum = all;
}

/* Sums of weighted values, `cols` vectors of the head from element `d` on, into out[row][d...]. */
INLINE void NAME(weigh)(const int rows, const int cols, const int is_half, const float *weights, const void *values,
                        const void *next, const int64_t *offsets, int64_t head_dim, int64_t d, int64_t from,
                        int64_t to, float *out)
{
    vf sum[ROWS * LANES / 4];
#pragma GCC unroll 16
    for (int i = 0; i < rows * cols; i++)
        sum[i] = (vf){0};
    for (int64_t n = from; n < to; n++) {
        for (int64_t c = 0; next && c < cols * LANES; c += is_half ? 32 : 16)
            PREFETCH(next, offsets[n] + d + c);
        vf v[LANES / 4];
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++)
            v[c] = NAME(load)(values, offsets[n] + d + c * LANES, is_half);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < cols; c++)
                sum[r * cols + c] += weights[r * CHUNK + n] * v[c];
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++)
            memcpy(out + r * (head_dim + PAD) + d + c * LANES, &sum[r * cols + c], sizeof(vf));
}

/* Up to ROWS rows of a task: their partial rows, or their results where the piece has one chunk only. */
INLINE void NAME(rows)(const int rows, const int is_half, const Job *job, const float *query, const void *next,
                       const int64_t *offsets, const int64_t (*range)[2], int64_t from, int64_t to, float *partial)
{
    float scores[ROWS * CHUNK] __attribute__((aligned(64)));
    int64_t head_dim = job->head_dim, d = 0;
    NAME(scores)(rows, is_half, query, job->keys, job->values, offsets, head_dim, from, to, scores);
    for (int r = 0; r < rows; r++) {
        float *row = scores + r * CHUNK, *tail = partial + r * (head_dim + PAD) + head_dim;
        int64_t low = range[r][0], high = range[r][1];
        tail[0] = -INFINITY, tail[1] = 0;
        if (low < high)
            NAME(weights)(row, low, high, job->scale, job->soft_cap, &tail[0], &tail[1]);
        else
            low = high = from;
        memset(row + from, 0, sizeof(float) * (low - from));
        memset(row + high, 0, sizeof(float) * (to - high));
    }
    for (; d + LANES * (LANES / 4) <= head_dim; d += LANES * (LANES / 4))
        NAME(weigh)(rows, LANES / 4, is_half, scores, job->values, next, offsets, head_dim, d, from, to, partial);
    for (; d < head_dim; d += LANES)
        NAME(weigh)(rows, 1, is_half, scores, job->values, next, offsets, head_dim, d, from, to, partial);
}

INLINE void NAME(finish)(const Job *job, const float *row, int64_t token, int64_t head)
{
    int64_t at = (token * job->num_qo_heads + head) * job->head_dim;
    float sum = row[job->head_dim + 1];
    for (int64_t d = 0; d < job->head_dim; d += LANES) {
        vf x;
        memcpy(&x, row + d, sizeof x);
        NAME(store)(job->out, at + d, x / sum, (int)job->is_bfloat16);
    }
}

/* The first partial row of a piece's chunk and kv head. */
INLINE float *NAME(place)(const Job *job, int64_t i, int64_t chunk, int64_t head)
{
    int64_t rows = (int64_t)job->qo_lens[i] * job->num_qo_heads;
    int64_t group_rows = rows / job->num_kv_heads;
    return job->partial + (job->row_indptr[i] + chunk * rows + head * group_rows) * (job->head_dim + PAD);
}

static void NAME(task)(const Job *job, int64_t task)
{
    int64_t unit = task / job->num_kv_heads, head = task % job->num_kv_heads, i = 0, end = job->num_pieces;
    while (end - i > 1) {
        int64_t middle = (i + end) / 2;
        if (job->chunk_indptr[middle] <= unit)
            i = middle;
        else
            end = middle;
    }
    int64_t chunk = unit - job->chunk_indptr[i], head_dim = job->head_dim;
    int64_t num_chunks = job->chunk_indptr[i + 1] - job->chunk_indptr[i], group = job->num_qo_heads / job->num_kv_heads;
    int64_t base = (job->first_chunk[i] + chunk) * CHUNK, first, last, unused;
    visible(job, i, 0, &first, &unused);
    visible(job, i, job->qo_lens[i] - 1, &unused, &last);
    int64_t from = first > base ? first - base : 0, to = last - base < CHUNK ? last - base : CHUNK;

    /* Slots outside [from, to) are never read: they may hold anything. Their place is taken by a neighbour. */
    int64_t offsets[CHUNK];
    const int32_t *pages = job->page_table + job->segments[i] * job->max_pages + (base + from) / job->page_size;
    int64_t stride = job->num_kv_heads * head_dim, within = (base + from) % job->page_size;
    int64_t offset = (*pages * job->page_size + within) * stride + head * head_dim;
    for (int64_t n = from / 16 * 16; n < (to + 15) / 16 * 16; n++) {
        offsets[n] = offset;
        if (n < from || n >= to - 1)
            continue;
        offset += stride;
        if (++within == job->page_size) {
            offset = *++pages * job->page_size * stride + head * head_dim;
            within = 0;
        }
    }
    float query[ROWS * head_dim] __attribute__((aligned(64)));
    int64_t num_rows = job->qo_lens[i] * group;
    /* The next task is mostly the next head of these slots: its keys are asked for meanwhile. */
    const char *next = head + 1 < job->num_kv_heads ? job->keys : NULL;
    if (next)
        next += head_dim * (job->is_bfloat16 ? 2 : 4);
    float *partial = NAME(place)(job, i, chunk, head);
    for (int64_t row = 0; row < num_rows; row += ROWS, partial += ROWS * (head_dim + PAD)) {
        int64_t range[ROWS][2], rows = num_rows - row < ROWS ? num_rows - row : ROWS, low = to, high = from;
        for (int64_t r = 0; r < rows; r++) {
            int64_t j = (row + r) / group, token = job->qo_starts[i] + j;
            int64_t at = (token * job->num_qo_heads + head * group + (row + r) % group) * head_dim;
            visible(job, i, j, &range[r][0], &range[r][1]);
            range[r][0] = range[r][0] - base > from ? range[r][0] - base : from;
            range[r][1] = range[r][1] - base < to ? range[r][1] - base : to;
            low = range[r][0] < low ? range[r][0] : low, high = range[r][1] > high ? range[r][1] : high;
            for (int64_t d = 0; d < head_dim; d += LANES) {
                vf x = job->is_bfloat16 ? NAME(load)(job->query, at + d, 1) : NAME(load)(job->query, at + d, 0);
                memcpy(query + r * head_dim + d, &x, sizeof x);
            }
        }
#define CASE(count, half)                                                                \
    case 2 * count + half:                                                               \
        NAME(rows)(count, half, job, query, next, offsets, range, low, high, partial);   \
        break;
        switch (2 * rows + job->is_bfloat16) {
            CASE(1, 0) CASE(2, 0) CASE(3, 0) CASE(4, 0) CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1)
        }
#undef CASE
        for (int64_t r = 0; num_chunks == 1 && r < rows; r++)
            NAME(finish)(job, partial + r * (head_dim + PAD), job->qo_starts[i] + (row + r) / group,
                         head * group + (row + r) % group);
    }
}

static void NAME(merge)(const Job *job, int64_t item)
{
    int64_t i = item / job->num_kv_heads, head = item % job->num_kv_heads;
    int64_t num_chunks = job->chunk_indptr[i + 1] - job->chunk_indptr[i], group = job->num_qo_heads / job->num_kv_heads;
    if (num_chunks == 1)
        return;
    int64_t head_dim = job->head_dim, stride = head_dim + PAD, jump = job->qo_lens[i] * job->num_qo_heads * stride;
    float *row = NAME(place)(job, i, 0, head);
    for (int64_t r = 0; r < job->qo_lens[i] * group; r++, row += stride) {
        float max = -INFINITY, sum = 0;
        for (int64_t c = 0; c < num_chunks; c++)
            max = row[c * jump + head_dim] > max ? row[c * jump + head_dim] : max;
        for (int64_t c = 0; c < num_chunks; c++) {
            float *part = row + c * jump, weight = expf(part[head_dim] - max); /* no score: 0 */
            sum += part[head_dim + 1] * weight;
            for (int64_t d = 0; d < head_dim; d += LANES) {
                vf x, y;
                memcpy(&x, row + d, sizeof x);
                memcpy(&y, part + d, sizeof y);
                x = c ? x + y * weight : y * weight;
                memcpy(row + d, &x, sizeof x);
            }
        }
        row[head_dim + 1] = sum;
        NAME(finish)(job, row, job->qo_starts[i] + r / group, head * group + r % group);
    }
}

#undef vf
#undef vi
#endif

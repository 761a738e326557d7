/* Element-wise steps of a transformer layer on the CPU, each in one pass over its rows.
 *
 * Arithmetic is float32; results are rounded once, to the dtype of their tensor. A row's result depends
 * on that row alone. Nothing here checks its arguments; fused.py does.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))
#define MAX_WIDTH 16384 /* elements of a row that is normalised */
#define FEW (1 << 14)   /* elements below which one thread is faster than two */

INLINE float widen(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
}

INLINE uint16_t narrow(float x) /* to nearest, ties to even; NaN stays NaN */
{
    uint32_t u;
    memcpy(&u, &x, 4);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return (u & 0x7fffffff) > 0x7f800000 ? (uint16_t)((u >> 16) | 0x40) : (uint16_t)rounded;
}

INLINE float get(const void *base, int64_t i, int is_half)
{
    return is_half ? widen(((const uint16_t *)base)[i]) : ((const float *)base)[i];
}

INLINE void put(void *base, int64_t i, float x, int is_half)
{
    if (is_half)
        ((uint16_t *)base)[i] = narrow(x);
    else
        ((float *)base)[i] = x;
}

/* exp(x) to about one unit in the last place, x clamped to [-87, 88]. Source: Cephes, expf. */
INLINE float fast_exp(float x)
{
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float t = x * 1.44269504f + 12582912.0f, n = t - 12582912.0f; /* 1.5 * 2**23: adding it rounds */
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    int32_t bits, whole;
    memcpy(&bits, &p, 4);
    memcpy(&whole, &t, 4);
    bits += (int32_t)((uint32_t)(whole - 0x4b400000) << 23);
    memcpy(&p, &bits, 4);
    return p;
}

/* x += added (when given); out = x / rms(x) * weight */
INLINE void norm_row(void *out, void *x, const void *added, const float *weight, int64_t width, float eps,
                     int is_half)
{
    float row[MAX_WIDTH], lanes[16] = {0};
    for (int64_t i = 0; i < width; i++)
        row[i] = get(x, i, is_half);
    if (added) {
        for (int64_t i = 0; i < width; i++) {
            put(x, i, row[i] + get(added, i, is_half), is_half);
            row[i] = get(x, i, is_half);
        }
    }
    int64_t whole = width / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16)
        for (int j = 0; j < 16; j++)
            lanes[j] += row[i + j] * row[i + j];
    for (int64_t i = whole; i < width; i++)
        lanes[0] += row[i] * row[i];
    float sum = 0;
    for (int j = 0; j < 16; j++)
        sum += lanes[j];
    float factor = 1.0f / sqrtf(sum / (float)width + eps);
    for (int64_t i = 0; i < width; i++)
        put(out, i, row[i] * factor * weight[i], is_half);
}

CLONES static void norm_half(void *out, void *x, const void *added, const float *weight, int64_t width, float eps)
{
    norm_row(out, x, added, weight, width, eps, 1);
}

CLONES static void norm_float(void *out, void *x, const void *added, const float *weight, int64_t width, float eps)
{
    norm_row(out, x, added, weight, width, eps, 0);
}

/* out = activation(gate) * up, where a row of `merged` is the gate's elements, then up's */
INLINE void gate_row(void *out, const void *merged, int64_t width, int is_gelu, int is_half)
{
    for (int64_t i = 0; i < width; i++) {
        float gate = get(merged, i, is_half), up = get(merged, width + i, is_half);
        /* gelu by tanh is x * sigmoid(2 * inner) */
        float inner = is_gelu ? 1.5957691216f * (gate + 0.044715f * gate * gate * gate) : gate;
        put(out, i, gate / (1.0f + fast_exp(-inner)) * up, is_half);
    }
}

CLONES static void silu_half(void *out, const void *merged, int64_t width) { gate_row(out, merged, width, 0, 1); }
CLONES static void silu_float(void *out, const void *merged, int64_t width) { gate_row(out, merged, width, 0, 0); }
CLONES static void gelu_half(void *out, const void *merged, int64_t width) { gate_row(out, merged, width, 1, 1); }
CLONES static void gelu_float(void *out, const void *merged, int64_t width) { gate_row(out, merged, width, 1, 0); }

/* A head, rotated by `angles`: the cosines of all pairs, then their sines. */
INLINE void rotate_head(void *out, const void *head, const float *angles, int64_t half, int is_neighbours, int is_half)
{
    for (int64_t i = 0; i < half; i++) {
        int64_t a = is_neighbours ? 2 * i : i, b = is_neighbours ? 2 * i + 1 : i + half;
        float x = get(head, a, is_half), y = get(head, b, is_half), c = angles[i], s = angles[half + i];
        put(out, a, x * c - y * s, is_half);
        put(out, b, y * c + x * s, is_half);
    }
}

/* One token's heads: q rotated to `out`, k rotated to its slot, v to its slot. */
INLINE void heads_row(void *out, void *key, void *value, const void *qkv, const float *angles, int64_t num_heads,
                      int64_t num_kv_heads, int64_t dim, int is_neighbours, int is_half)
{
    int64_t size = is_half ? 2 : 4, step = dim * size;
    const char *head = qkv;
    for (int64_t h = 0; h < num_heads; h++, head += step)
        rotate_head((char *)out + h * step, head, angles, dim / 2, is_neighbours, is_half);
    for (int64_t h = 0; h < num_kv_heads; h++, head += step)
        rotate_head((char *)key + h * step, head, angles, dim / 2, is_neighbours, is_half);
    memcpy(value, head, num_kv_heads * step);
}

CLONES static void heads_half(void *out, void *key, void *value, const void *qkv, const float *angles, int64_t h,
                              int64_t k, int64_t d, int is_neighbours)
{
    if (is_neighbours)
        heads_row(out, key, value, qkv, angles, h, k, d, 1, 1);
    else
        heads_row(out, key, value, qkv, angles, h, k, d, 0, 1);
}

CLONES static void heads_float(void *out, void *key, void *value, const void *qkv, const float *angles, int64_t h,
                               int64_t k, int64_t d, int is_neighbours)
{
    if (is_neighbours)
        heads_row(out, key, value, qkv, angles, h, k, d, 1, 0);
    else
        heads_row(out, key, value, qkv, angles, h, k, d, 0, 0);
}

static int integers(PyObject *const *args, Py_ssize_t num_args, int64_t *v, int count)
{
    if (num_args != count) {
        PyErr_Format(PyExc_TypeError, "takes %d arguments, not %zd", count, num_args);
        return -1;
    }
    for (int i = 0; i < count; i++)
        v[i] = PyLong_AsLongLong(args[i]);
    return PyErr_Occurred() ? -1 : 0;
}

/* norm(threads, is_half, num_rows, width, out, x, added or 0, weight, eps) */
static PyObject *norm(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    int64_t v[8];
    (void)self;
    float eps = num_args ? (float)PyFloat_AsDouble(args[num_args - 1]) : 0;
    if (integers(args, num_args - 1, v, 8) < 0)
        return NULL;
    int64_t rows = v[2], width = v[3], step = width * (v[1] ? 2 : 4);
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for schedule(static) num_threads((int)v[0]) if (rows > 1 && rows * width > FEW)
    for (int64_t i = 0; i < rows; i++)
        (v[1] ? norm_half : norm_float)((char *)v[4] + i * step, (char *)v[5] + i * step,
                                        v[6] ? (char *)v[6] + i * step : NULL, (float *)v[7], width, eps);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* gate(threads, is_half, num_rows, width, is_gelu, out, merged) */
static PyObject *gate(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    int64_t v[7];
    (void)self;
    if (integers(args, num_args, v, 7) < 0)
        return NULL;
    int64_t rows = v[2], width = v[3], step = width * (v[1] ? 2 : 4);
    void (*row)(void *, const void *, int64_t) =
        v[1] ? (v[4] ? gelu_half : silu_half) : (v[4] ? gelu_float : silu_float);
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for schedule(static) num_threads((int)v[0]) if (rows > 1 && rows * width > FEW)
    for (int64_t i = 0; i < rows; i++)
        row((char *)v[5] + i * step, (char *)v[6] + 2 * i * step, width);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* heads(threads, is_half, num_rows, num_heads, num_kv_heads, head_dim, is_neighbours, out, keys, values,
 *       slots, qkv, angles) */
static PyObject *heads(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    int64_t v[13];
    (void)self;
    if (integers(args, num_args, v, 13) < 0)
        return NULL;
    int64_t rows = v[2], h = v[3], k = v[4], d = v[5], step = d * (v[1] ? 2 : 4);
    const int64_t *slots = (const int64_t *)v[10];
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for schedule(static) num_threads((int)v[0]) if (rows > 1 && rows * (h + k) * d > FEW)
    for (int64_t i = 0; i < rows; i++)
        (v[1] ? heads_half : heads_float)((char *)v[7] + i * h * step, (char *)v[8] + slots[i] * k * step,
                                          (char *)v[9] + slots[i] * k * step,
                                          (char *)v[11] + i * (h + 2 * k) * step, (float *)v[12] + i * d, h, k, d,
                                          (int)v[6]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"norm", (PyCFunction)(void (*)(void))norm, METH_FASTCALL, "Residual sum and RMS norm; see fused.py."},
    {"gate", (PyCFunction)(void (*)(void))gate, METH_FASTCALL, "Gated activation; see fused.py."},
    {"heads", (PyCFunction)(void (*)(void))heads, METH_FASTCALL, "Rotation and KV write; see fused.py."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_fused", "Element-wise steps of a transformer layer.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__fused(void)
{
    PyObject *self = PyModule_Create(&module);
    if (self && PyModule_AddIntConstant(self, "MAX_WIDTH", MAX_WIDTH) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}

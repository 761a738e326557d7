/* Keys of pages without items, each folded into the next.

   A page's preimage is u32(32), the key before it, u32(4 n), its n ids, u32(0); all numbers
   little-endian. SHA-256 (FIPS 180-4) runs on the processor's own instructions; where there are
   none, and for whatever is not plain, the caller does it in Python. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_SHA 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define HAS_SHA 0
#endif

enum { KEY = 32, BLOCK = 64, MAX_IDS = 4096 };
enum { BEFORE_IDS = 4 + KEY + 4, MAX_PREIMAGE = BEFORE_IDS + 4 * MAX_IDS + 4 + 9 + BLOCK };

#if HAS_SHA

static const uint32_t ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

/* Whether the processor has the instructions below. */
static int has_sha(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & (1u << 29)))
        return 0;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 9)) && (c & (1u << 19));
}

/* SHA-256 of whole, padded blocks into 32 bytes.

   The instructions keep the eight words as (a, b, e, f) and (c, d, g, h), first word highest. Two
   rounds turn the first half into a new one, and the old one becomes the second half. */
__attribute__((target("sha,sse4.1,ssse3"))) static void digest_blocks(
    const uint8_t *data, size_t num_blocks, uint8_t *digest) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i abef = _mm_set_epi32(0x6a09e667, (int)0xbb67ae85, 0x510e527f, (int)0x9b05688c);
    __m128i cdgh = _mm_set_epi32(0x3c6ef372, (int)0xa54ff53a, 0x1f83d9ab, 0x5be0cd19);
    for (; num_blocks; num_blocks--, data += BLOCK) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
#pragma GCC unroll 16
        for (int group = 0; group < 16; group++) {
            __m128i *own = &w[group & 3];
            if (group < 4) {
                const __m128i raw = _mm_loadu_si128((const __m128i *)(data + 16 * group));
                *own = _mm_shuffle_epi8(raw, swap);
            } else {
                const __m128i last = w[(group + 3) & 3], second = w[(group + 2) & 3];
                const __m128i first = _mm_sha256msg1_epu32(*own, w[(group + 1) & 3]);
                *own = _mm_sha256msg2_epu32(
                    _mm_add_epi32(first, _mm_alignr_epi8(last, second, 4)), last);
            }
            const __m128i k = _mm_loadu_si128((const __m128i *)(ROUND + 4 * group));
            const __m128i wk = _mm_add_epi32(*own, k);
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(wk, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    uint32_t halves[8];
    _mm_storeu_si128((__m128i *)halves, abef);
    _mm_storeu_si128((__m128i *)(halves + 4), cdgh);
    static const int place[8] = {3, 2, 7, 6, 1, 0, 5, 4};
    for (int i = 0; i < 8; i++) {
        const uint32_t word = __builtin_bswap32(halves[place[i]]);
        memcpy(digest + 4 * i, &word, 4);
    }
}

#else

static int has_sha(void) { return 0; }
static void digest_blocks(const uint8_t *data, size_t num_blocks, uint8_t *digest) {}

#endif

/* A page's preimage, its ids in place: put everything else around them and digest it. */
static void fold_page(uint8_t *preimage, const uint8_t *prev, uint32_t num_ids, uint8_t *key) {
    const uint32_t key_nbytes = KEY, ids_nbytes = 4 * num_ids;
    size_t end = BEFORE_IDS + (size_t)ids_nbytes + 4;
    const size_t num_blocks = (end + 9 + BLOCK - 1) / BLOCK;
    memcpy(preimage, &key_nbytes, 4);
    memcpy(preimage + 4, prev, KEY);
    memcpy(preimage + 4 + KEY, &ids_nbytes, 4);
    memset(preimage + end - 4, 0, num_blocks * BLOCK - (end - 4));
    preimage[end] = 0x80;
    const uint64_t num_bits = __builtin_bswap64(8 * (uint64_t)end);
    memcpy(preimage + num_blocks * BLOCK - 8, &num_bits, 8);
    digest_blocks(preimage, num_blocks, key);
}

/* Put the ids of a list or tuple into the preimage; -1 where one is not plain. */
static Py_ssize_t take_ids(PyObject *page, uint8_t *ids) {
    if (!PyList_CheckExact(page) && !PyTuple_CheckExact(page))
        return -1;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(page);
    PyObject **items = PySequence_Fast_ITEMS(page);
    if (count > MAX_IDS)
        return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = items[i];
        if (!PyLong_CheckExact(item))
            return -1;
        int overflow;
        const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
        if (overflow || value < 0 || value > UINT32_MAX)
            return -1;
        const uint32_t id = (uint32_t)value;
        memcpy(ids + 4 * i, &id, 4);
    }
    return count;
}

static int check_prev(const Py_buffer *prev) {
    if (prev->len == KEY)
        return 0;
    PyErr_Format(PyExc_ValueError, "prev has %zd bytes, a key has %d", prev->len, KEY);
    return -1;
}

/* fold_lists(prev, pages): keys of lists or tuples of ids, up to the first that is not plain. */
static PyObject *fold_lists(PyObject *module, PyObject *args) {
    Py_buffer prev;
    PyObject *pages;
    if (!PyArg_ParseTuple(args, "y*O!", &prev, &PyList_Type, &pages))
        return NULL;
    PyObject *keys = check_prev(&prev) ? NULL : PyList_New(0);
    uint8_t preimage[MAX_PREIMAGE], key[KEY];
    if (keys)
        memcpy(key, prev.buf, KEY);
    for (Py_ssize_t i = 0; keys && i < PyList_GET_SIZE(pages); i++) {
        const Py_ssize_t count = take_ids(PyList_GET_ITEM(pages, i), preimage + BEFORE_IDS);
        if (count < 0)
            break;
        fold_page(preimage, key, (uint32_t)count, key);
        PyObject *made = PyBytes_FromStringAndSize((const char *)key, KEY);
        if (!made || PyList_Append(keys, made))
            Py_CLEAR(keys);
        Py_XDECREF(made);
    }
    PyBuffer_Release(&prev);
    return keys;
}

/* fold_packed(prev, ids, num_ids): keys of pages of num_ids ids each, packed as uint32. */
static PyObject *fold_packed(PyObject *module, PyObject *args) {
    Py_buffer prev, ids;
    Py_ssize_t num_ids;
    if (!PyArg_ParseTuple(args, "y*y*n", &prev, &ids, &num_ids))
        return NULL;
    PyObject *keys = NULL;
    if (num_ids < 0 || num_ids > MAX_IDS || (num_ids ? ids.len % (4 * num_ids) : ids.len))
        PyErr_Format(PyExc_ValueError, "%zd bytes are no pages of %zd ids", ids.len, num_ids);
    else if (!check_prev(&prev))
        keys = PyList_New(num_ids ? ids.len / (4 * num_ids) : 0);
    uint8_t preimage[MAX_PREIMAGE], key[KEY];
    if (keys)
        memcpy(key, prev.buf, KEY);
    for (Py_ssize_t i = 0; keys && i < PyList_GET_SIZE(keys); i++) {
        memcpy(preimage + BEFORE_IDS, (const char *)ids.buf + 4 * num_ids * i, 4 * num_ids);
        fold_page(preimage, key, (uint32_t)num_ids, key);
        PyObject *made = PyBytes_FromStringAndSize((const char *)key, KEY);
        if (made)
            PyList_SET_ITEM(keys, i, made);
        else
            Py_CLEAR(keys);
    }
    PyBuffer_Release(&prev);
    PyBuffer_Release(&ids);
    return keys;
}

static PyMethodDef METHODS[] = {
    {"fold_lists", fold_lists, METH_VARARGS, "Return keys of lists of ids, while they are plain."},
    {"fold_packed", fold_packed, METH_VARARGS, "Return keys of pages of packed ids."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_chain", NULL, -1, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__chain(void) {
    if (!has_sha()) {
        PyErr_SetString(PyExc_ImportError, "this processor has no instructions for SHA-256");
        return NULL;
    }
    return PyModule_Create(&MODULE);
}

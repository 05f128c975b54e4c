/* What a step on an x86-64 CPU spends most of its time on beside matrix products. See tiles.py, norms.py,
blocks.py, products.py and crops.py.

Addresses and sizes come from Python; nothing here knows torch. Threads are those of torch's OpenMP library. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef __x86_64__
#error "written for x86-64"
#endif

#include "vectors.h"

/* A pass of a batch norm over rows of channels, as psm.kernels.bn_relu.Pass has it. */

enum { CHANNELS = 32, SUMS = 3 }; /* channels at a time; sums of a piece */

struct norm {
    const float *x, *plus, *gradient;
    float *y, *of_x, *of_plus;
    float *norm, *plus_norm; /* rows by channel */
    float *sums;
    Py_ssize_t rows, columns, rows_each;
    double eps;
};

/* A convolution, as psm.kernels.winograd.Pass has it. */

enum { OWN = 4, MOST = 9 }; /* places along a tile's side: of its result, and the most that it sees */

struct tiles {
    const float *maps, *maps_norm, *taps;
    float *result;
    const float *result_norm, *gradient;
    float *of_maps, *of_taps, *sums;
    const float *shortcut_taps;
    float *shortcut;
    const float *shortcut_norm, *shortcut_gradient;
    float *of_shortcut_taps, *shortcut_sums, *room;
    Py_ssize_t count, height, width, inputs, outputs, stride;
    Py_ssize_t adds;                        /* to of_maps, which hold something already */
    Py_ssize_t slots, together, block, gap; /* shares, maps and tiles at a time, floats between planes */
};

/* A search in a bank and a sum over one, as psm.kernels.similarity has them. */

enum { TOGETHER = 96, QUERIES = 128 }; /* rows of a sum, and the most queries, at a time */

struct search {
    const float *rows, *queries;
    const int *ids, *own;
    float *maxima, *values;
    int *chosen, *places;
    Py_ssize_t count, inner, columns, group, block, k;
};

struct sum {
    const float *rows, *queries;
    float *level, *total, *mean;
    Py_ssize_t count, inner, columns, group;
};

/* Views of images, as psm.kernels.crop.Pass has it. */

struct views {
    const unsigned char *images;
    const float *boxes, *flip, *matrix, *pivot, *shades; /* of each view; shades: luma, mean and deviation */
    float *views;
    Py_ssize_t count, all, height, width, size; /* images, views of all of them; sides */
    Py_ssize_t most;                            /* pixels that a place sees along a line */
    Py_ssize_t pixel, channel;                  /* floats from one to the next in a view */
};

#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#define NAME(name) name##_8
VECTORS
#include "norms.h"
#include "tiles.h"
#include "products.h"
#include "views.h"
#undef LANES
#undef TARGET
#undef NAME

#define LANES 16
#define TARGET __attribute__((target("avx512f")))
#define NAME(name) name##_16
VECTORS
#include "norms.h"
#include "tiles.h"
#include "products.h"
#include "views.h"

/* Threads. Parts are handed out one at a time. */

/* The start of a parallel region, as every OpenMP library has it for programs compiled by GCC. */
typedef void parallel_region(void (*)(void *), void *, unsigned, unsigned);

struct work {
    void (*part)(const void *, Py_ssize_t);
    const void *of;
    Py_ssize_t count, next;
};

static void share(void *shared)
{
    struct work *work = shared;
    for (;;) {
        Py_ssize_t number = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (number >= work->count)
            return;
        work->part(work->of, number);
    }
}

/* What is wrong with what was given, if anything. */

static const char *wrong_tiles(const struct tiles *tiles, int lanes)
{
    const Py_ssize_t side = tiles->stride * OWN, by = tiles->sums ? CHANNELS : 2 * lanes;
    if (tiles->stride < 1 || tiles->stride > 2 || (tiles->shortcut && tiles->stride != 2))
        return "strides are 1 or 2, and 2 beside a shortcut";
    if (tiles->height % side || tiles->width % side || tiles->inputs % by || tiles->outputs % by || tiles->block % 12)
        return "sides go in tiles, channels in pairs of vectors, or in 32s with norms, tiles in twelves";
    return NULL;
}

static const char *wrong_norm(const struct norm *norm, int lanes)
{
    (void)lanes;
    if (norm->columns % CHANNELS || norm->rows < 1 || norm->rows_each < 1)
        return "channels go in 32s, rows are needed";
    return NULL;
}

static const char *wrong_search(const struct search *search, int lanes)
{
    if (search->columns % (2 * lanes) || search->group % (2 * lanes) || search->group < 1 || search->block < 1)
        return "queries go in pairs of vectors, rows in blocks";
    return NULL;
}

static const char *wrong_sum(const struct sum *sum, int lanes)
{
    if (sum->columns % (2 * lanes) || sum->group % (2 * lanes) || sum->group < 1 || sum->group > QUERIES)
        return "queries go in pairs of vectors, 128 at a time at most";
    if (sum->inner % (2 * lanes))
        return "rows go in pairs of vectors";
    return NULL;
}

static const char *wrong_views(const struct views *views, int lanes)
{
    (void)lanes;
    const Py_ssize_t size = views->size, side = views->height > views->width ? views->height : views->width;
    if (views->count < 1 || size < 1 || views->height < 1 || views->width < 1 || views->most * size < 2 * side + 3 * size)
        return "images, places and room for what they see are needed";
    if (views->pixel == 1 ? views->channel != size * size : views->pixel != 3 || views->channel != 1)
        return "channels come first or last";
    return NULL;
}

/* Passes, for Python: vector lanes, threads, how they start, address and size of what is wanted. Each slot of a
   convolution has its part of the room and of the taps' gradients, and its maps, whoever comes first: sums do not depend
   on that. */

#define PASS(name, kind, parts)                                                                              \
    static PyObject *call_##name(PyObject *self, PyObject *arguments)                                        \
    {                                                                                                        \
        int lanes, threads;                                                                                  \
        unsigned long long parallel, address, size;                                                          \
        (void)self;                                                                                          \
        if (!PyArg_ParseTuple(arguments, "iiKKK", &lanes, &threads, &parallel, &address, &size))             \
            return NULL;                                                                                     \
        if (size != sizeof(struct kind)) {                                                                   \
            PyErr_SetString(PyExc_TypeError, "not of this size");                                            \
            return NULL;                                                                                     \
        }                                                                                                    \
        const struct kind *given = (const struct kind *)(uintptr_t)address;                                  \
        const char *wrong = lanes == 8 || lanes == 16 ? wrong_##kind(given, lanes) : "vectors have 8 or 16 lanes"; \
        if (wrong) {                                                                                         \
            PyErr_SetString(PyExc_ValueError, wrong);                                                        \
            return NULL;                                                                                     \
        }                                                                                                    \
        struct work work = {lanes == 16 ? name##_16 : name##_8, given, parts, 0};                            \
        Py_BEGIN_ALLOW_THREADS                                                                               \
        if (parallel && threads > 1)                                                                         \
            ((parallel_region *)(uintptr_t)parallel)(share, &work, (unsigned)threads, 0);                    \
        else                                                                                                 \
            share(&work);                                                                                    \
        Py_END_ALLOW_THREADS                                                                                 \
        Py_RETURN_NONE;                                                                                      \
    }

#define PIECES ((given->rows + given->rows_each - 1) / given->rows_each)

PASS(convolve, tiles, given->slots)
PASS(convolve_back, tiles, given->slots)
PASS(moments, norm, PIECES)
PASS(settle, norm, given->columns / CHANNELS)
PASS(normalize, norm, PIECES)
PASS(sums_of_gradient, norm, PIECES)
PASS(settle_gradient, norm, given->columns / CHANNELS)
PASS(gradient_of_x, norm, PIECES)
PASS(views, views, given->all)
PASS(search, search, (given->columns + given->group - 1) / given->group)
PASS(sum, sum, (given->columns + given->group - 1) / given->group)

#define ENTRY(name) {#name, call_##name, METH_VARARGS, NULL}

static PyMethodDef functions[] = {
    ENTRY(convolve),  ENTRY(convolve_back),    ENTRY(moments),         ENTRY(settle),
    ENTRY(normalize), ENTRY(sums_of_gradient), ENTRY(settle_gradient), ENTRY(gradient_of_x),
    ENTRY(search),    ENTRY(sum),              ENTRY(views),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&module);
}

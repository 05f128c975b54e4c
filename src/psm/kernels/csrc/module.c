/* CPU kernels for x86-64, compiled for AVX2 and for AVX-512. See winograd.py, bn_relu.py, basic_block.py, similarity.py,
plane_gemm.py, transforms.py and crop.py.

Addresses and sizes come from Python; nothing here depends on torch. Threads are those of torch's OpenMP library. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef __x86_64__
#error "written for x86-64"
#endif

#include "simd.h"

#define CEIL_DIV(a, b) (((a) + (b)-1) / (b))

/* Fused BN + add + ReLU over (rows, channels), as psm.kernels.bn_relu.BatchNormArgs. */

enum { CHANNEL_BLOCK = 32, PARTIALS = 3 }; /* channels at a time; sums that a chunk of rows has */

struct bn_relu {
    const float *x, *residual, *grad_out;
    float *y, *grad_x, *grad_residual;
    float *bn, *residual_bn; /* (11, channels), the rows of simd.h */
    float *partials;         /* (chunks, PARTIALS, channels) */
    float *running_mean, *running_var;
    Py_ssize_t rows, channels, chunk_rows;
    double eps, momentum;
};

/* A 3x3 convolution, as psm.kernels.winograd.WinogradArgs. */

enum { TILE = 4, MAX_INPUT_TILE = 9 }; /* pixels along the side of an output tile, and the most of an input tile */

struct winograd {
    const float *x, *x_bn, *weight; /* weight and shortcut_weight are transformed and packed */
    float *out;
    const float *out_bn, *grad_out;
    float *grad_x, *grad_weight, *partials;
    const float *shortcut_weight;
    float *shortcut;
    const float *shortcut_bn, *shortcut_grad_out;
    float *grad_shortcut_weight, *shortcut_partials, *workspace;
    Py_ssize_t batch, height, width, in_channels, out_channels, stride;
    Py_ssize_t accumulate;                               /* adds to grad_x instead of overwriting it */
    Py_ssize_t slots, images, tile_block, plane_padding; /* parts, images and tiles at a time, floats between planes */
};

/* A convolution's weight (inner, columns, taps, taps) of any strides, and its transform by G (elements, taps), as
   psm.kernels.transforms.WeightArgs. */

struct weights {
    float *weight, *transformed;
    const float *g;
    Py_ssize_t inner, columns, taps, elements, slots, packed;
    Py_ssize_t inner_stride, column_stride, row_stride, tap_stride;
};

/* Feature maps (images, inputs, channels) times a matrix (outputs, inputs) each, as psm.kernels.transforms.PixelArgs. */

enum { MAX_PIXELS = 64 }; /* of an image, before and after */

struct pixels {
    const float *x, *matrix;
    float *out;
    Py_ssize_t images, inputs, outputs, channels;
};

/* Reductions over similarities with a bank, as psm.kernels.similarity.TopkArgs and LogSumExpArgs. */

enum { ROW_BLOCK = 96, MAX_QUERIES = 128 }; /* rows at a time of a log-sum-exp, and the most queries */

struct topk {
    const float *rows, *queries;
    const int *ids, *exclude_ids;
    float *block_max, *values;
    int *top_blocks, *indices;
    Py_ssize_t num_rows, dim, num_queries, group, block, k;
};

struct logsumexp {
    const float *rows, *queries;
    float *max, *total, *mean;
    Py_ssize_t num_rows, dim, num_queries, group;
};

/* Matrix products, one for each plane: c (rows, columns) = a (rows, inner) b (inner, columns), as
   psm.kernels.plane_gemm.PlaneArgs. Columns of c lie next to each other; the other distances are given. */

enum { INNER_BLOCK = 256, ROW_GROUP = 384 }; /* rows of b that are packed at a time, rows of a part */

struct planes {
    const float *a, *b;
    float *c;
    Py_ssize_t planes, rows, inner, columns;
    Py_ssize_t a_plane, a_row, a_inner, b_plane, b_row, b_column, c_plane, c_row;
};

/* Views of images, as psm.kernels.crop.CropArgs. */

struct crop {
    const unsigned char *images;
    const float *boxes, *flip, *color, *pivot, *constants; /* of each view; constants: luma, mean and std */
    float *views;
    Py_ssize_t num_images, num_views, height, width, size;
    Py_ssize_t max_taps; /* source pixels of an output pixel along an axis */
    Py_ssize_t pixel_stride, channel_stride;
};

#define SIMD_WIDTH 8
#define TARGET __attribute__((target("avx2,fma")))
#define NAME(name) name##_8
SIMD_TYPES
#include "bn_relu.h"
#include "winograd.h"
#include "transforms.h"
#include "similarity.h"
#include "plane_gemm.h"
#include "crop.h"
#undef SIMD_WIDTH
#undef TARGET
#undef NAME

#define SIMD_WIDTH 16
#define TARGET __attribute__((target("avx512f")))
#define NAME(name) name##_16
SIMD_TYPES
#include "bn_relu.h"
#include "winograd.h"
#include "transforms.h"
#include "similarity.h"
#include "plane_gemm.h"
#include "crop.h"

/* Threads take parts one at a time. */

/* GOMP_parallel, the start of a parallel region in every OpenMP library that runs code compiled by GCC. */
typedef void parallel_region(void (*)(void *), void *, unsigned, unsigned);

struct work {
    void (*kernel)(const void *, Py_ssize_t);
    const void *args;
    Py_ssize_t parts, next;
};

static void run_parts(void *shared)
{
    struct work *work = shared;
    for (;;) {
        Py_ssize_t part = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (part >= work->parts)
            return;
        work->kernel(work->args, part);
    }
}

/* Checks of sizes: what is wrong, or NULL. */

static const char *check_winograd(const struct winograd *args, int width)
{
    const Py_ssize_t side = args->stride * TILE, multiple = args->partials ? CHANNEL_BLOCK : 2 * width;
    if (args->stride < 1 || args->stride > 2 || (args->shortcut && args->stride != 2))
        return "the stride must be 1 or 2, and 2 with a shortcut";
    if (args->height % side || args->width % side)
        return "height and width must be multiples of the input step of a tile";
    if (args->in_channels % multiple || args->out_channels % multiple || args->tile_block % 12)
        return "channels must be multiples of two vectors (of 32 with batch norm), tile_block of 12";
    return NULL;
}

static const char *check_weights(const struct weights *args, int width)
{
    if (args->columns % (2 * width) || args->columns < 1 || args->inner < 1 || args->slots < 1)
        return "columns must be a multiple of two vectors, inner and slots positive";
    const Py_ssize_t taps = args->taps, elements = args->elements;
    if (!(taps == 1 && elements == 1) && !(taps == 3 && (elements == 3 || elements == 5 || elements == 6 || elements == 9)))
        return "elements must be 1 of one tap, or 3, 5, 6 or 9 of three";
    return NULL;
}

static const char *check_pixels(const struct pixels *args, int width)
{
    if (args->channels % width || args->channels < 1 || args->images < 1)
        return "channels must be a multiple of a vector, images positive";
    if (args->inputs < 1 || args->outputs < 1 || args->inputs > MAX_PIXELS || args->outputs > MAX_PIXELS)
        return "inputs and outputs must be 1 to 64";
    return NULL;
}

static const char *check_bn_relu(const struct bn_relu *args, int width)
{
    (void)width;
    if (args->channels % CHANNEL_BLOCK || args->rows < 1 || args->chunk_rows < 1)
        return "channels must be a multiple of 32, rows and chunk_rows positive";
    return NULL;
}

static const char *check_topk(const struct topk *args, int width)
{
    if (args->num_queries % (2 * width) || args->group % (2 * width) || args->group < 1 || args->block < 1)
        return "num_queries and group must be multiples of two vectors, block positive";
    return NULL;
}

static const char *check_logsumexp(const struct logsumexp *args, int width)
{
    if (args->num_queries % (2 * width) || args->group % (2 * width) || args->group < 1 || args->group > MAX_QUERIES)
        return "num_queries and group must be multiples of two vectors, group at most 128";
    if (args->dim % (2 * width))
        return "dim must be a multiple of two vectors";
    return NULL;
}

static const char *check_planes(const struct planes *args, int width)
{
    if (args->columns % (2 * width) || args->columns < 1 || args->rows < 1 || args->inner < 1 || args->planes < 1)
        return "columns must be a multiple of two vectors, rows, inner and planes positive";
    return NULL;
}

static const char *check_crop(const struct crop *args, int width)
{
    (void)width;
    const Py_ssize_t size = args->size, side = args->height > args->width ? args->height : args->width;
    if (args->num_images < 1 || size < 1 || args->height < 1 || args->width < 1)
        return "images and views must not be empty";
    if (args->max_taps * size < 2 * side + 3 * size)
        return "max_taps is too small for this resize";
    if (args->pixel_stride == 1 ? args->channel_stride != size * size
                                : args->pixel_stride != 3 || args->channel_stride != 1)
        return "views must be contiguous or channels-last";
    return NULL;
}

/* Kernels for Python: SIMD width, threads, address of GOMP_parallel, address and size of the arguments. Each slot of a
   convolution has its part of the workspace and of grad_weight, and its images, whichever thread takes it: results do
   not depend on that. */

#define KERNEL(name, kind, num_parts)                                                                        \
    static PyObject *py_##name(PyObject *self, PyObject *arguments)                                          \
    {                                                                                                        \
        int width, threads;                                                                                  \
        unsigned long long parallel, address, size;                                                          \
        (void)self;                                                                                          \
        if (!PyArg_ParseTuple(arguments, "iiKKK", &width, &threads, &parallel, &address, &size))             \
            return NULL;                                                                                     \
        if (size != sizeof(struct kind)) {                                                                   \
            PyErr_SetString(PyExc_TypeError, "arguments of another size");                                   \
            return NULL;                                                                                     \
        }                                                                                                    \
        const struct kind *args = (const struct kind *)(uintptr_t)address;                                   \
        const char *error = width == 8 || width == 16 ? check_##kind(args, width) : "the SIMD width must be 8 or 16"; \
        if (error) {                                                                                         \
            PyErr_SetString(PyExc_ValueError, error);                                                        \
            return NULL;                                                                                     \
        }                                                                                                    \
        struct work work = {width == 16 ? name##_16 : name##_8, args, num_parts, 0};                         \
        Py_BEGIN_ALLOW_THREADS                                                                               \
        if (parallel && threads > 1)                                                                         \
            ((parallel_region *)(uintptr_t)parallel)(run_parts, &work, (unsigned)threads, 0);                \
        else                                                                                                 \
            run_parts(&work);                                                                                \
        Py_END_ALLOW_THREADS                                                                                 \
        Py_RETURN_NONE;                                                                                      \
    }

KERNEL(winograd_forward, winograd, args->slots)
KERNEL(winograd_backward, winograd, args->slots)
KERNEL(transform_weight, weights, args->columns / (2 * width))
KERNEL(transform_grad_weight, weights, args->inner)
KERNEL(transform_pixels, pixels, args->images)
KERNEL(bn_partial_stats, bn_relu, CEIL_DIV(args->rows, args->chunk_rows))
KERNEL(bn_finalize_stats, bn_relu, args->channels / CHANNEL_BLOCK)
KERNEL(bn_add_relu, bn_relu, CEIL_DIV(args->rows, args->chunk_rows))
KERNEL(bn_grad_partials, bn_relu, CEIL_DIV(args->rows, args->chunk_rows))
KERNEL(bn_finalize_grad, bn_relu, args->channels / CHANNEL_BLOCK)
KERNEL(bn_grad_input, bn_relu, CEIL_DIV(args->rows, args->chunk_rows))
KERNEL(topk_similarity, topk, CEIL_DIV(args->num_queries, args->group))
KERNEL(logsumexp_similarity, logsumexp, CEIL_DIV(args->num_queries, args->group))
KERNEL(plane_gemm, planes, args->planes * (args->columns / (2 * width)) * CEIL_DIV(args->rows, ROW_GROUP))
KERNEL(crop_color, crop, args->num_views)

#define ENTRY(name) {#name, py_##name, METH_VARARGS, NULL}

static PyMethodDef functions[] = {
    ENTRY(winograd_forward),  ENTRY(winograd_backward),    ENTRY(transform_weight), ENTRY(transform_grad_weight),
    ENTRY(bn_partial_stats),  ENTRY(bn_finalize_stats),    ENTRY(bn_add_relu),      ENTRY(bn_grad_partials),
    ENTRY(bn_finalize_grad),  ENTRY(bn_grad_input),        ENTRY(topk_similarity),  ENTRY(logsumexp_similarity),
    ENTRY(plane_gemm),        ENTRY(crop_color),           ENTRY(transform_pixels),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&module);
}

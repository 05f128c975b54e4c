/* What a step on an x86-64 CPU spends most of its time on beside matrix products. See tiles.py and norms.py.

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

/* A 3x3 convolution by tiles. The places that a tile sees lie in planes, one for each, (tiles, channels) each. */

enum { OWN = 4, SEEN = 6, PLANES = SEEN * SEEN }; /* places along a tile's side: its own, those it sees; all it sees */

struct tiles {
    const float *from, *taps, *gradient;
    float *to, *of_taps, *room;
    Py_ssize_t maps, height, width, inputs, outputs;
    Py_ssize_t slots, together, block, gap; /* shares, maps and tiles at a time, floats between planes */
};

/* Batch norm of rows of channels. */

enum { CHANNELS = 32 }; /* at a time */

struct norm {
    const float *x, *plus, *gradient;
    float *y, *of_x, *of_plus, *sums;
    float *mean, *variance, *scale, *offset, *first, *second; /* by channel */
    Py_ssize_t rows, columns, rows_each;
};

#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#define NAME(name) name##_8
#include "norms.h"
#include "tiles.h"
#undef LANES
#undef TARGET
#undef NAME

#define LANES 16
#define TARGET __attribute__((target("avx512f")))
#define NAME(name) name##_16
#include "norms.h"
#include "tiles.h"

/* Threads. Parts are handed out one at a time. */

/* The start of a parallel region, as every OpenMP library has it for programs compiled by GCC. */
typedef void parallel_region(void (*)(void *), void *, unsigned, unsigned);

struct crew {
    int lanes, threads;
    unsigned long long parallel;
};

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

static void run(const struct crew *crew, void (*part)(const void *, Py_ssize_t), const void *of, Py_ssize_t count)
{
    struct work work = {part, of, count, 0};
    if (crew->parallel && crew->threads > 1)
        ((parallel_region *)(uintptr_t)crew->parallel)(share, &work, (unsigned)crew->threads, 0);
    else
        share(&work);
}

/* The part's function for the crew's vectors. */
#define PART(crew, name) ((crew)->lanes == 16 ? name##_16 : name##_8)

static int able(const struct crew *crew)
{
    if (crew->lanes == 8 || crew->lanes == 16)
        return 1;
    PyErr_SetString(PyExc_ValueError, "vectors have 8 or 16 lanes");
    return 0;
}

#define AT(address) ((float *)(uintptr_t)(address))

/* A convolution, for Python: crew, addresses and sizes as in struct tiles. Each slot has its part of the room and of
   of_taps, and its maps, whoever comes first: sums do not depend on that. */

static PyObject *over_tiles(PyObject *arguments, int back)
{
    unsigned long long from, taps, gradient, to, of_taps, room;
    struct crew crew;
    struct tiles tiles;
    if (!PyArg_ParseTuple(arguments, "iiKKKKKKKnnnnnnnnn", &crew.lanes, &crew.threads, &crew.parallel, &from, &taps,
                          &gradient, &to, &of_taps, &room, &tiles.maps, &tiles.height, &tiles.width, &tiles.inputs,
                          &tiles.outputs, &tiles.slots, &tiles.together, &tiles.block, &tiles.gap)
        || !able(&crew))
        return NULL;
    const int pair = 2 * crew.lanes;
    if (tiles.height % OWN || tiles.width % OWN || tiles.inputs % pair || tiles.outputs % pair || tiles.block % 12) {
        PyErr_SetString(PyExc_ValueError, "sides go in fours, channels in pairs of vectors, tiles in twelves");
        return NULL;
    }
    tiles.from = AT(from), tiles.taps = AT(taps), tiles.gradient = AT(gradient);
    tiles.to = AT(to), tiles.of_taps = AT(of_taps), tiles.room = AT(room);
    Py_BEGIN_ALLOW_THREADS
    run(&crew, back ? PART(&crew, convolve_back) : PART(&crew, convolve), &tiles, tiles.slots);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *convolve(PyObject *self, PyObject *arguments)
{
    (void)self;
    return over_tiles(arguments, 0);
}

static PyObject *convolve_back(PyObject *self, PyObject *arguments)
{
    (void)self;
    return over_tiles(arguments, 1);
}

/* Batch norm, for Python. `channels` are eight rows by channel: weight and bias, which are given, mean, variance,
   scale, offset and room for two more. */

static int norm_of(PyObject *arguments, struct crew *crew, struct norm *norm, Py_ssize_t *pieces, double *eps,
                   float **channels)
{
    unsigned long long x, plus, y, gradient, of_x, of_plus, sums, by_channel;
    if (!PyArg_ParseTuple(arguments, "iiKKKKKKKKKnnnd", &crew->lanes, &crew->threads, &crew->parallel, &x, &plus, &y,
                          &gradient, &of_x, &of_plus, &sums, &by_channel, &norm->rows, &norm->columns,
                          &norm->rows_each, eps)
        || !able(crew))
        return 0;
    if (norm->columns % CHANNELS || norm->rows < 1 || norm->rows_each < 1) {
        PyErr_SetString(PyExc_ValueError, "channels go in 32s, rows are needed");
        return 0;
    }
    norm->x = AT(x), norm->plus = AT(plus), norm->y = AT(y), norm->gradient = AT(gradient);
    norm->of_x = AT(of_x), norm->of_plus = AT(of_plus), norm->sums = AT(sums);
    float *row = *channels = AT(by_channel);
    norm->mean = row + 2 * norm->columns, norm->variance = row + 3 * norm->columns;
    norm->scale = row + 4 * norm->columns, norm->offset = row + 5 * norm->columns;
    norm->first = row + 6 * norm->columns, norm->second = row + 7 * norm->columns;
    *pieces = (norm->rows + norm->rows_each - 1) / norm->rows_each;
    return 1;
}

/* Mean and variance (of all, not unbiased) from the pieces' sums; then the scale and offset that normalise. */
static void settle(const struct norm *norm, Py_ssize_t pieces, double eps, const float *weight, const float *bias)
{
    const Py_ssize_t columns = norm->columns;
    for (Py_ssize_t c = 0; c < columns; c++) {
        double mean = 0, far = 0;
        for (int pass = 0; pass < 2; pass++)
            for (Py_ssize_t piece = 0; piece < pieces; piece++) {
                const Py_ssize_t start = piece * norm->rows_each;
                const Py_ssize_t left = norm->rows - start;
                const double count = left < norm->rows_each ? left : norm->rows_each;
                const double sum = norm->sums[piece * 2 * columns + c];
                const double here = norm->x[start * columns + c] + sum / count;
                if (!pass)
                    mean += here * count / norm->rows;
                else
                    far += norm->sums[(piece * 2 + 1) * columns + c] - sum * sum / count
                        + count * (here - mean) * (here - mean);
            }
        const double variance = far > 0 || far != far ? far / norm->rows : 0;
        const double scale = weight[c] / sqrt(variance + eps);
        norm->mean[c] = (float)mean;
        norm->variance[c] = (float)variance;
        norm->scale[c] = (float)scale;
        norm->offset[c] = (float)(bias[c] - mean * scale);
    }
}

static PyObject *norm_forward(PyObject *self, PyObject *arguments)
{
    struct crew crew;
    struct norm norm;
    Py_ssize_t pieces;
    double eps;
    float *channels;
    (void)self;
    if (!norm_of(arguments, &crew, &norm, &pieces, &eps, &channels))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    run(&crew, PART(&crew, moments), &norm, pieces);
    settle(&norm, pieces, eps, channels, channels + norm.columns);
    run(&crew, PART(&crew, normalise), &norm, pieces);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* The gradients of weight and bias replace the last two rows by channel. */
static PyObject *norm_backward(PyObject *self, PyObject *arguments)
{
    struct crew crew;
    struct norm norm;
    Py_ssize_t pieces;
    double eps;
    float *channels;
    (void)self;
    if (!norm_of(arguments, &crew, &norm, &pieces, &eps, &channels))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    run(&crew, PART(&crew, sums_of_gradient), &norm, pieces);
    for (Py_ssize_t c = 0; c < norm.columns; c++) {
        double sum = 0, product = 0;
        for (Py_ssize_t piece = 0; piece < pieces; piece++) {
            sum += norm.sums[piece * 2 * norm.columns + c];
            product += norm.sums[(piece * 2 + 1) * norm.columns + c];
        }
        norm.first[c] = (float)(sum / norm.rows);
        norm.second[c] = (float)(product / norm.rows / (norm.variance[c] + eps));
    }
    run(&crew, PART(&crew, gradient_of_x), &norm, pieces);
    for (Py_ssize_t c = 0; c < norm.columns; c++) {
        norm.first[c] *= norm.rows;
        norm.second[c] *= norm.rows * sqrtf(norm.variance[c] + eps);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"convolve", convolve, METH_VARARGS, "A 3x3 convolution."},
    {"convolve_back", convolve_back, METH_VARARGS, "The gradients of it."},
    {"norm_forward", norm_forward, METH_VARARGS, "relu(norm(x) + plus)"},
    {"norm_backward", norm_backward, METH_VARARGS, "The gradients of it."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&module);
}

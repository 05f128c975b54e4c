/* Weights of a convolution and their transforms by G over both axes: G w transpose(G) of the taps, packed as gemm in
winograd.h reads them, and the transpose of that for their gradients. A weight of 1x1 is packed as it is. */

#define MAX_TAPS 3
#define FOR_EACH_HALF for (int v = 0; v < 2; v++)

/* A pair of vectors of columns of the weight; packed: (planes, pairs, inner, a pair), else (planes, inner, columns). */
INLINE NAME(weight_pair)(const struct weights *args, Py_ssize_t pair, const int taps, const int elements)
{
    const Py_ssize_t width = 2 * SIMD_WIDTH;
    const float *const from = args->weight + pair * width * args->column_stride;
    const Py_ssize_t step = args->packed ? width : args->columns;
    float *const to = args->transformed + pair * width * (args->packed ? args->inner : 1);
    float buffer[MAX_TAPS * MAX_TAPS][2 * SIMD_WIDTH];
    vector half[MAX_INPUT_TILE][MAX_TAPS];
    for (Py_ssize_t i = 0; i < args->inner; i++) {
        for (int k = 0; k < taps * taps; k++) {
            const float *const at =
                from + i * args->inner_stride + k / taps * args->row_stride + k % taps * args->tap_stride;
            if (args->column_stride == 1)
                FOR_EACH_HALF STORE(buffer[k] + v * SIMD_WIDTH, LOAD(at + v * SIMD_WIDTH));
            else
                for (Py_ssize_t c = 0; c < width; c++)
                    buffer[k][c] = at[c * args->column_stride];
        }
        FOR_EACH_HALF {
            for (int a = 0; a < elements; a++)
                for (int l = 0; l < taps; l++) {
                    vector sum = {0};
                    for (int k = 0; k < taps; k++)
                        sum += args->g[a * taps + k] * LOAD(buffer[k * taps + l] + v * SIMD_WIDTH);
                    half[a][l] = sum;
                }
            for (int a = 0; a < elements; a++)
                for (int b = 0; b < elements; b++) {
                    vector sum = {0};
                    for (int l = 0; l < taps; l++)
                        sum += args->g[b * taps + l] * half[a][l];
                    STORE(to + (a * elements + b) * args->columns * args->inner + i * step + v * SIMD_WIDTH, sum);
                }
        }
    }
}

/* A row of inner of the weight's gradient, from its transform (slots, planes, inner, columns). */
INLINE NAME(grad_weight_row)(const struct weights *args, Py_ssize_t i, const int taps, const int elements)
{
    const Py_ssize_t plane = args->inner * args->columns;
    for (Py_ssize_t column = 0; column < args->columns; column += SIMD_WIDTH) {
        const float *const from = args->transformed + i * args->columns + column;
        float *const to = args->weight + i * args->inner_stride + column * args->column_stride;
        vector half[MAX_TAPS][MAX_INPUT_TILE] = {{{0}}};
        for (int a = 0; a < elements; a++)
            for (int b = 0; b < elements; b++) {
                vector sum = {0};
                for (Py_ssize_t slot = 0; slot < args->slots; slot++)
                    sum += LOAD(from + ((slot * elements + a) * elements + b) * plane);
                for (int k = 0; k < taps; k++)
                    half[k][b] += args->g[a * taps + k] * sum;
            }
        for (int k = 0; k < taps; k++)
            for (int l = 0; l < taps; l++) {
                float *const at = to + k * args->row_stride + l * args->tap_stride;
                vector sum = {0};
                for (int b = 0; b < elements; b++)
                    sum += args->g[b * taps + l] * half[k][b];
                if (args->column_stride == 1)
                    STORE(at, sum);
                else
                    for (int c = 0; c < SIMD_WIDTH; c++)
                        at[c * args->column_stride] = sum[c];
            }
    }
}

/* With constant numbers of taps and elements the compiler unrolls the loops over them. */
#define BY_SHAPE(function, index)                                                                            \
    const struct weights copy = *(const struct weights *)given, *const args = &copy;                         \
    if (args->taps == 1)                                                                                     \
        NAME(function)(args, index, 1, 1);                                                                   \
    else if (args->elements == 3)                                                                            \
        NAME(function)(args, index, 3, 3);                                                                   \
    else if (args->elements == 5)                                                                            \
        NAME(function)(args, index, 3, 5);                                                                   \
    else if (args->elements == 6)                                                                            \
        NAME(function)(args, index, 3, 6);                                                                   \
    else                                                                                                     \
        NAME(function)(args, index, 3, 9);

TARGET static void NAME(transform_weight)(const void *given, Py_ssize_t pair) { BY_SHAPE(weight_pair, pair) }

TARGET static void NAME(transform_grad_weight)(const void *given, Py_ssize_t i) { BY_SHAPE(grad_weight_row, i) }

#undef BY_SHAPE

/* The pixels of an image (inputs, channels) times a matrix (outputs, inputs) with many zeros. */
TARGET static void NAME(transform_pixels)(const void *given, Py_ssize_t image)
{
    const struct pixels copy = *(const struct pixels *)given, *const args = &copy;
    const float *const x = args->x + image * args->inputs * args->channels;
    float *const out = args->out + image * args->outputs * args->channels;
    for (Py_ssize_t o = 0; o < args->outputs; o++) {
        float factors[MAX_PIXELS];
        const float *rows[MAX_PIXELS];
        int count = 0;
        for (Py_ssize_t i = 0; i < args->inputs; i++)
            if (args->matrix[o * args->inputs + i] != 0)
                factors[count] = args->matrix[o * args->inputs + i], rows[count++] = x + i * args->channels;
        for (Py_ssize_t channel = 0; channel < args->channels; channel += SIMD_WIDTH) {
            vector sum = {0};
            for (int k = 0; k < count; k++)
                sum += factors[k] * LOAD(rows[k] + channel);
            STORE(out + o * args->channels + channel, sum);
        }
    }
}

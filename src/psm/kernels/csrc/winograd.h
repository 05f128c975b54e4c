/* 3x3 convolutions by Winograd F(4x4, 3x3): out = A' [(G w G') * (B' x B)] A, tile by tile.

B and A are the Toom-Cook matrices of the input and of the output; G, that of the weight, is applied in transforms.h. The
transformed tiles lie in planes, one for each element of a tile, of (tiles, channels) each, and each plane is a GEMM.

The input may come through a batch norm, relu(bn(x)), and the gradient of the output from one: both are computed where
they are read. */

/* One dimension, stride 1: the points 0, +-2/3, +-3/2 and infinity, as in small_conv.TOOM_COOK; `_t`: transposed. */

INLINE NAME(input_1d)(const vector *x, vector *tile)
{
    const vector even = 729.f / 520 * x[2] - 81.f / 130 * x[4], odd = 243.f / 260 * x[1] - 27.f / 65 * x[3];
    const vector even_far = 64.f / 65 * x[4] - 256.f / 585 * x[2], odd_far = 96.f / 65 * x[3] - 128.f / 195 * x[1];
    tile[0] = .5f * x[0] - 97.f / 72 * x[2] + .5f * x[4];
    tile[1] = even + odd;
    tile[2] = even - odd;
    tile[3] = even_far + odd_far;
    tile[4] = even_far - odd_far;
    tile[5] = .5f * x[1] - 97.f / 72 * x[3] + .5f * x[5];
}

INLINE NAME(input_1d_t)(const vector *tile, vector *x)
{
    const vector even = tile[1] + tile[2], odd = tile[1] - tile[2];
    const vector even_far = tile[3] + tile[4], odd_far = tile[3] - tile[4];
    x[0] = .5f * tile[0];
    x[1] = 243.f / 260 * odd - 128.f / 195 * odd_far + .5f * tile[5];
    x[2] = 729.f / 520 * even - 256.f / 585 * even_far - 97.f / 72 * tile[0];
    x[3] = 96.f / 65 * odd_far - 27.f / 65 * odd - 97.f / 72 * tile[5];
    x[4] = 64.f / 65 * even_far - 81.f / 130 * even + .5f * tile[0];
    x[5] = .5f * tile[5];
}

INLINE NAME(output_1d)(const vector *tile, vector *y)
{
    const vector even = tile[1] + tile[2], odd = tile[1] - tile[2];
    const vector even_far = tile[3] + tile[4], odd_far = tile[3] - tile[4];
    y[0] = tile[0] + even + .25f * even_far;
    y[1] = 2.f / 3 * odd + .375f * odd_far;
    y[2] = 4.f / 9 * even + 9.f / 16 * even_far;
    y[3] = 8.f / 27 * odd + 27.f / 32 * odd_far + tile[5];
}

INLINE NAME(output_1d_t)(const vector *y, vector *tile)
{
    const vector even = y[0] + 4.f / 9 * y[2], odd = 2.f / 3 * y[1] + 8.f / 27 * y[3];
    const vector even_far = .25f * y[0] + 9.f / 16 * y[2], odd_far = .375f * y[1] + 27.f / 32 * y[3];
    tile[0] = y[0];
    tile[1] = even + odd;
    tile[2] = even - odd;
    tile[3] = even_far + odd_far;
    tile[4] = even_far - odd_far;
    tile[5] = y[3];
}

/* One dimension, stride 2: odd pixels meet one tap of the weight and take a product each, the first four of a tile;
   even pixels meet two taps, by the points 0, 1, -2/3, -3/2 and infinity. */

INLINE NAME(strided_input_1d)(const vector *x, vector *tile)
{
    tile[0] = x[1];
    tile[1] = x[3];
    tile[2] = x[5];
    tile[3] = x[7];
    tile[4] = x[0] + 7.f / 6 * (x[2] - x[4]) - x[6];
    tile[5] = 6.f / 25 * (x[2] + x[6]) + 13.f / 25 * x[4];
    tile[6] = 27.f / 50 * x[4] + 27.f / 25 * x[6] - 81.f / 50 * x[2];
    tile[7] = 16.f / 75 * x[2] + 8.f / 75 * x[4] - 8.f / 25 * x[6];
    tile[8] = x[8] + 7.f / 6 * (x[6] - x[4]) - x[2];
}

INLINE NAME(strided_input_1d_t)(const vector *tile, vector *x)
{
    x[0] = tile[4];
    x[1] = tile[0];
    x[2] = 7.f / 6 * tile[4] + 6.f / 25 * tile[5] - 81.f / 50 * tile[6] + 16.f / 75 * tile[7] - tile[8];
    x[3] = tile[1];
    x[4] = 13.f / 25 * tile[5] + 27.f / 50 * tile[6] + 8.f / 75 * tile[7] - 7.f / 6 * (tile[4] + tile[8]);
    x[5] = tile[2];
    x[6] = 7.f / 6 * tile[8] + 6.f / 25 * tile[5] + 27.f / 25 * tile[6] - 8.f / 25 * tile[7] - tile[4];
    x[7] = tile[3];
    x[8] = tile[8];
}

INLINE NAME(strided_output_1d)(const vector *tile, vector *y)
{
    y[0] = tile[0] + tile[4] + tile[5] + tile[6] + tile[7];
    y[1] = tile[1] + tile[5] - 2.f / 3 * tile[6] - 3.f / 2 * tile[7];
    y[2] = tile[2] + tile[5] + 4.f / 9 * tile[6] + 9.f / 4 * tile[7];
    y[3] = tile[3] + tile[5] - 8.f / 27 * tile[6] - 27.f / 8 * tile[7] + tile[8];
}

INLINE NAME(strided_output_1d_t)(const vector *y, vector *tile)
{
    for (int i = 0; i < TILE; i++)
        tile[i] = y[i];
    tile[4] = y[0];
    tile[5] = y[0] + y[1] + y[2] + y[3];
    tile[6] = y[0] - 2.f / 3 * y[1] + 4.f / 9 * y[2] - 8.f / 27 * y[3];
    tile[7] = y[0] - 3.f / 2 * y[1] + 9.f / 4 * y[2] - 27.f / 8 * y[3];
    tile[8] = y[3];
}

/* Two dimensions: columns first, then rows, SIMD_WIDTH channels at a time. `top` and `left` are the first pixel of the
   tile; its input has `input_tile` pixels along a side and starts one pixel before. */

typedef void NAME(transform)(const vector *, vector *);

#define FOR_EACH_CHANNEL for (Py_ssize_t channel = 0; channel < channels; channel += SIMD_WIDTH)
#define PIXEL(y, x) (((y) * width + (x)) * channels + channel)
#define PLANE(i, j) (((i) * input_tile + (j)) * plane + channel)
#define INSIDE(y, x) ((size_t)(y) < (size_t)height && (size_t)(x) < (size_t)width)
#define LOAD_BN(bn, row) ((bn) ? LOAD(BN_ROW(bn, row, channels) + channel) : (vector){0})

INLINE NAME(transform_input)(const float *image, const float *bn, float *tile, Py_ssize_t height, Py_ssize_t width,
                             Py_ssize_t channels, Py_ssize_t top, Py_ssize_t left, Py_ssize_t plane, int input_tile,
                             NAME(transform) input_1d)
{
    vector column[MAX_INPUT_TILE], row[MAX_INPUT_TILE], half[MAX_INPUT_TILE][MAX_INPUT_TILE];
    FOR_EACH_CHANNEL {
        const vector scale = LOAD_BN(bn, SCALE), shift = LOAD_BN(bn, SHIFT);
        for (int j = 0; j < input_tile; j++) {
            for (int i = 0; i < input_tile; i++) {
                const Py_ssize_t y = top + i - 1, x = left + j - 1;
                column[i] = (vector){0};
                if (INSIDE(y, x)) {
                    column[i] = LOAD(image + PIXEL(y, x));
                    if (bn) {
                        column[i] = column[i] * scale + shift;
                        column[i] = RELU(column[i]);
                    }
                }
            }
            input_1d(column, row);
            for (int i = 0; i < input_tile; i++)
                half[i][j] = row[i];
        }
        for (int i = 0; i < input_tile; i++) {
            input_1d(half[i], row);
            for (int j = 0; j < input_tile; j++)
                STORE(tile + PLANE(i, j), row[j]);
        }
    }
}

INLINE NAME(transform_output)(const float *tile, float *image, Py_ssize_t width, Py_ssize_t channels, Py_ssize_t top,
                              Py_ssize_t left, Py_ssize_t plane, int input_tile, NAME(transform) output_1d)
{
    vector column[MAX_INPUT_TILE], row[MAX_INPUT_TILE], half[TILE][MAX_INPUT_TILE];
    FOR_EACH_CHANNEL {
        for (int j = 0; j < input_tile; j++) {
            for (int i = 0; i < input_tile; i++)
                column[i] = LOAD(tile + PLANE(i, j));
            output_1d(column, row);
            for (int i = 0; i < TILE; i++)
                half[i][j] = row[i];
        }
        for (int i = 0; i < TILE; i++) {
            output_1d(half[i], row);
            for (int j = 0; j < TILE; j++)
                STORE(image + PIXEL(top + i, left + j), row[j]);
        }
    }
}

/* The transpose of transform_input: adds to grad_input, where input tiles overlap. */
INLINE NAME(transform_grad_input)(const float *tile, float *image, Py_ssize_t height, Py_ssize_t width,
                                  Py_ssize_t channels, Py_ssize_t top, Py_ssize_t left, Py_ssize_t plane,
                                  int input_tile, NAME(transform) input_1d_t)
{
    vector column[MAX_INPUT_TILE], row[MAX_INPUT_TILE], half[MAX_INPUT_TILE][MAX_INPUT_TILE];
    FOR_EACH_CHANNEL {
        for (int j = 0; j < input_tile; j++) {
            for (int i = 0; i < input_tile; i++)
                column[i] = LOAD(tile + PLANE(i, j));
            input_1d_t(column, row);
            for (int i = 0; i < input_tile; i++)
                half[i][j] = row[i];
        }
        for (int i = 0; i < input_tile; i++) {
            input_1d_t(half[i], row);
            for (int j = 0; j < input_tile; j++) {
                const Py_ssize_t y = top + i - 1, x = left + j - 1;
                if (INSIDE(y, x))
                    STORE(image + PIXEL(y, x), LOAD(image + PIXEL(y, x)) + row[j]);
            }
        }
    }
}

/* The gradient of a convolution's output; where a batch norm follows, through that norm (`out` is its input). */
#define LOAD_BN_GRAD                                                                                         \
    const vector scale = LOAD_BN(bn, SCALE), mean = LOAD_BN(bn, MEAN), grad_mean = LOAD_BN(bn, GRAD_MEAN),   \
                 grad_slope = LOAD_BN(bn, GRAD_SLOPE);
#define GRAD_OUT(at)                                                                                         \
    (bn ? (vector)(scale * (LOAD(grad_out + (at)) - grad_mean - grad_slope * (LOAD(out + (at)) - mean)))     \
        : (vector)LOAD(grad_out + (at)))

/* The transpose of transform_output. */
INLINE NAME(transform_grad_output)(const float *grad_out, const float *out, const float *bn, float *tile,
                                   Py_ssize_t width, Py_ssize_t channels, Py_ssize_t top, Py_ssize_t left,
                                   Py_ssize_t plane, int input_tile, NAME(transform) output_1d_t)
{
    vector column[MAX_INPUT_TILE], row[MAX_INPUT_TILE], half[MAX_INPUT_TILE][MAX_INPUT_TILE];
    FOR_EACH_CHANNEL {
        LOAD_BN_GRAD
        for (int j = 0; j < TILE; j++) {
            for (int i = 0; i < TILE; i++)
                column[i] = GRAD_OUT(PIXEL(top + i, left + j));
            output_1d_t(column, row);
            for (int i = 0; i < input_tile; i++)
                half[i][j] = row[i];
        }
        for (int i = 0; i < input_tile; i++) {
            output_1d_t(half[i], row);
            for (int j = 0; j < input_tile; j++)
                STORE(tile + PLANE(i, j), row[j]);
        }
    }
}

/* The same for a shortcut, a 1x1 convolution of stride 2 beside a 3x3 one of stride 2. Its input pixels are the first
   four along the sides of an input tile, not transformed, and neither is its output. */

#define FOR_EACH_TILE_PIXEL for (int i = 0; i < TILE; i++) for (int j = 0; j < TILE; j++)

INLINE NAME(store_shortcut)(const float *tile, float *image, Py_ssize_t width, Py_ssize_t channels, Py_ssize_t top,
                            Py_ssize_t left, Py_ssize_t plane)
{
    const int input_tile = TILE;
    FOR_EACH_TILE_PIXEL FOR_EACH_CHANNEL
        STORE(image + PIXEL(top + i, left + j), LOAD(tile + PLANE(i, j)));
}

INLINE NAME(load_shortcut_grad)(const float *grad_out, const float *out, const float *bn, float *tile,
                                Py_ssize_t width, Py_ssize_t channels, Py_ssize_t top, Py_ssize_t left,
                                Py_ssize_t plane)
{
    const int input_tile = TILE;
    FOR_EACH_CHANNEL {
        LOAD_BN_GRAD
        FOR_EACH_TILE_PIXEL
            STORE(tile + PLANE(i, j), GRAD_OUT(PIXEL(top + i, left + j)));
    }
}

/* GEMM of a plane, GEMM_ROWS rows by a pair of vectors at a time in registers: c (rows, columns) is, or grows by,
   a (rows, inner) times b, packed as (pairs of vectors, inner, a pair). Rows are rounded up to GEMM_ROWS; those past
   the last tile hold whatever they held. */

enum {
    NAME(GEMM_ROWS) = SIMD_WIDTH == 16 ? 12 : 6,
    NAME(GEMM_T_ROWS) = SIMD_WIDTH == 16 ? 8 : 4,
    NAME(GEMM_COLUMNS) = 2 * SIMD_WIDTH
};

TARGET static void NAME(gemm)(const float *restrict a, const float *restrict b, float *restrict c, Py_ssize_t rows,
                              Py_ssize_t inner, Py_ssize_t columns, int accumulate)
{
    for (Py_ssize_t column = 0; column < columns; column += NAME(GEMM_COLUMNS))
        for (Py_ssize_t row = 0; row < rows; row += NAME(GEMM_ROWS)) {
            vector sums[NAME(GEMM_ROWS)][2] = {0};
            const float *packed = b + column * inner;
            for (int r = 0; accumulate && r < NAME(GEMM_ROWS); r++) {
                sums[r][0] = LOAD(c + (row + r) * columns + column);
                sums[r][1] = LOAD(c + (row + r) * columns + column + SIMD_WIDTH);
            }
            for (Py_ssize_t k = 0; k < inner; k++, packed += NAME(GEMM_COLUMNS)) {
                const vector low = LOAD(packed), high = LOAD(packed + SIMD_WIDTH);
                for (int r = 0; r < NAME(GEMM_ROWS); r++) {
                    const float factor = a[(row + r) * inner + k];
                    sums[r][0] += factor * low;
                    sums[r][1] += factor * high;
                }
            }
            for (int r = 0; r < NAME(GEMM_ROWS); r++) {
                STORE(c + (row + r) * columns + column, sums[r][0]);
                STORE(c + (row + r) * columns + column + SIMD_WIDTH, sums[r][1]);
            }
        }
}

/* c (m, n) is, or grows by, the transpose of a (rows, m) times b (rows, n): grad_weight from grad_out and input. */
TARGET static void NAME(gemm_tn)(const float *restrict a, const float *restrict b, float *restrict c, Py_ssize_t rows,
                                 Py_ssize_t m, Py_ssize_t n, int accumulate)
{
    for (Py_ssize_t i = 0; i < m; i += NAME(GEMM_T_ROWS))
        for (Py_ssize_t j = 0; j < n; j += NAME(GEMM_COLUMNS)) {
            vector sums[NAME(GEMM_T_ROWS)][2] = {0};
            float *at = c + i * n + j;
            for (int r = 0; accumulate && r < NAME(GEMM_T_ROWS); r++) {
                sums[r][0] = LOAD(at + r * n);
                sums[r][1] = LOAD(at + r * n + SIMD_WIDTH);
            }
            for (Py_ssize_t k = 0; k < rows; k++) {
                const vector low = LOAD(b + k * n + j), high = LOAD(b + k * n + j + SIMD_WIDTH);
                for (int r = 0; r < NAME(GEMM_T_ROWS); r++) {
                    const float factor = a[k * m + i + r];
                    sums[r][0] += factor * low;
                    sums[r][1] += factor * high;
                }
            }
            for (int r = 0; r < NAME(GEMM_T_ROWS); r++) {
                STORE(at + r * n, sums[r][0]);
                STORE(at + r * n + SIMD_WIDTH, sums[r][1]);
            }
        }
}

/* The images of a slot: `images` at a time, `tile_block` of their tiles at a time. Input tiles start every `step`
   pixels. Each slot has a part of the workspace. */

#define FOR_EACH_TILE                                                                                        \
    for (Py_ssize_t tile = 0, row, column, image; tile < count                                               \
         && (image = first + (start + tile) / image_tiles, row = (start + tile) % image_tiles / across,      \
             column = (start + tile) % across, 1); tile++)

#define FOR_EACH_TILE_BLOCK                                                                                  \
    const struct winograd copy = *(const struct winograd *)given, *const args = &copy;                       \
    const Py_ssize_t height = args->height, width = args->width, across = width / step;                      \
    const Py_ssize_t image_tiles = height / step * across, images = args->images, block = args->tile_block;  \
    const Py_ssize_t in_channels = args->in_channels, in_plane = block * in_channels + args->plane_padding;  \
    const Py_ssize_t out_channels = args->out_channels, out_plane = block * out_channels + args->plane_padding;\
    const Py_ssize_t in_size = height * width * in_channels;                                                 \
    const Py_ssize_t out_size = image_tiles * TILE * TILE * out_channels;                                    \
    const int planes = input_tile * input_tile;                                                              \
    float *const in_planes = args->workspace + slot * (planes * in_plane + (planes + TILE * TILE) * out_plane);\
    float *const out_planes = in_planes + planes * in_plane;                                                 \
    float *const shortcut_planes = out_planes + planes * out_plane;                                          \
    for (Py_ssize_t first = slot * images; first < args->batch; first += args->slots * images)               \
        for (Py_ssize_t start = 0, count,                                                                    \
             all = image_tiles * (args->batch - first < images ? args->batch - first : images);              \
             start < all && (count = all - start < block ? all - start : block); start += block)

#define ROUND_UP(rows) (((rows) + NAME(GEMM_ROWS) - 1) / NAME(GEMM_ROWS) * NAME(GEMM_ROWS))
#define AT(tensor, index, size) ((tensor) ? (tensor) + (index) * (size) : (tensor))
#define IN_IMAGE(tensor) AT(tensor, image, in_size)
#define OUT_IMAGE(tensor) AT(tensor, image, out_size)
#define INPUT_SHAPE height, width, in_channels, row * step, column * step, in_plane, input_tile
#define OUTPUT_SHAPE across * TILE, out_channels, row * TILE, column * TILE, out_plane
#define FOR_EACH_IMAGE for (Py_ssize_t image = first; image < first + all / image_tiles; image++)

INLINE NAME(conv_forward)(const void *given, Py_ssize_t slot, int input_tile, int step, NAME(transform) input_1d,
                          NAME(transform) output_1d)
{
    FOR_EACH_TILE_BLOCK {
        FOR_EACH_TILE
            NAME(transform_input)(IN_IMAGE(args->x), args->x_bn, in_planes + tile * in_channels, INPUT_SHAPE, input_1d);
        for (int p = 0; p < planes; p++)
            NAME(gemm)(in_planes + p * in_plane, args->weight + p * in_channels * out_channels,
                       out_planes + p * out_plane, ROUND_UP(count), in_channels, out_channels, 0);
        FOR_EACH_TILE
            NAME(transform_output)(out_planes + tile * out_channels, OUT_IMAGE(args->out), OUTPUT_SHAPE, input_tile,
                                   output_1d);
        if (args->shortcut) {
            FOR_EACH_TILE_PIXEL
                NAME(gemm)(in_planes + (i * input_tile + j) * in_plane, args->shortcut_weight,
                           shortcut_planes + (i * TILE + j) * out_plane, ROUND_UP(count), in_channels, out_channels, 0);
            FOR_EACH_TILE
                NAME(store_shortcut)(shortcut_planes + tile * out_channels, OUT_IMAGE(args->shortcut), OUTPUT_SHAPE);
        }
        if (args->partials && start + count == all) {
            struct bn_relu bn = {.x = args->out, .partials = args->partials, .channels = out_channels};
            bn.chunk_rows = image_tiles * TILE * TILE, bn.rows = args->batch * bn.chunk_rows;
            FOR_EACH_IMAGE
                NAME(bn_partial_stats)(&bn, image);
            bn.x = args->shortcut, bn.partials = args->shortcut_partials;
            if (args->shortcut)
                FOR_EACH_IMAGE
                    NAME(bn_partial_stats)(&bn, image);
        }
    }
}

INLINE NAME(conv_backward)(const void *given, Py_ssize_t slot, int input_tile, int step, NAME(transform) input_1d,
                           NAME(transform) input_1d_t, NAME(transform) output_1d_t)
{
    FOR_EACH_TILE_BLOCK {
        float *const grad_weight = AT(args->grad_weight, slot, planes * in_channels * out_channels);
        float *const grad_shortcut_weight = AT(args->grad_shortcut_weight, slot, in_channels * out_channels);
        const int accumulate = start || first >= args->slots * images;
        FOR_EACH_TILE
            NAME(transform_grad_output)(OUT_IMAGE(args->grad_out), OUT_IMAGE(args->out), args->out_bn,
                                        out_planes + tile * out_channels, OUTPUT_SHAPE, input_tile, output_1d_t);
        if (args->shortcut)
            FOR_EACH_TILE
                NAME(load_shortcut_grad)(OUT_IMAGE(args->shortcut_grad_out), OUT_IMAGE(args->shortcut),
                                         args->shortcut_bn, shortcut_planes + tile * out_channels, OUTPUT_SHAPE);
        if (args->grad_weight) {
            FOR_EACH_TILE
                NAME(transform_input)(IN_IMAGE(args->x), args->x_bn, in_planes + tile * in_channels, INPUT_SHAPE,
                                      input_1d);
            for (int p = 0; p < planes; p++)
                NAME(gemm_tn)(out_planes + p * out_plane, in_planes + p * in_plane,
                              grad_weight + p * in_channels * out_channels, count, out_channels, in_channels,
                              accumulate);
            if (args->shortcut)
                FOR_EACH_TILE_PIXEL
                    NAME(gemm_tn)(shortcut_planes + (i * TILE + j) * out_plane,
                                  in_planes + (i * input_tile + j) * in_plane, grad_shortcut_weight, count,
                                  out_channels, in_channels, accumulate || i || j);
        }
        if (args->grad_x) {
            if (!start && !args->accumulate)
                memset(args->grad_x + first * in_size, 0, all / image_tiles * in_size * sizeof(float));
            for (int p = 0; p < planes; p++)
                NAME(gemm)(out_planes + p * out_plane, args->weight + p * in_channels * out_channels,
                           in_planes + p * in_plane, ROUND_UP(count), out_channels, in_channels, 0);
            if (args->shortcut)
                FOR_EACH_TILE_PIXEL
                    NAME(gemm)(shortcut_planes + (i * TILE + j) * out_plane, args->shortcut_weight,
                               in_planes + (i * input_tile + j) * in_plane, ROUND_UP(count), out_channels, in_channels,
                               1);
            FOR_EACH_TILE
                NAME(transform_grad_input)(in_planes + tile * in_channels, IN_IMAGE(args->grad_x), INPUT_SHAPE,
                                           input_1d_t);
            if (args->partials && start + count == all) {
                struct bn_relu bn = {.x = args->x, .grad_out = args->grad_x, .grad_residual = args->grad_x,
                                     .bn = (float *)args->x_bn, .partials = args->partials, .channels = in_channels};
                bn.chunk_rows = height * width, bn.rows = args->batch * bn.chunk_rows;
                FOR_EACH_IMAGE
                    NAME(bn_grad_partials)(&bn, image);
            }
        }
    }
}

TARGET static void NAME(winograd_forward)(const void *given, Py_ssize_t slot)
{
    if (((const struct winograd *)given)->stride == 1)
        NAME(conv_forward)(given, slot, 6, TILE, NAME(input_1d), NAME(output_1d));
    else
        NAME(conv_forward)(given, slot, 9, 2 * TILE, NAME(strided_input_1d), NAME(strided_output_1d));
}

TARGET static void NAME(winograd_backward)(const void *given, Py_ssize_t slot)
{
    if (((const struct winograd *)given)->stride == 1)
        NAME(conv_backward)(given, slot, 6, TILE, NAME(input_1d), NAME(input_1d_t), NAME(output_1d_t));
    else
        NAME(conv_backward)(given, slot, 9, 2 * TILE, NAME(strided_input_1d), NAME(strided_input_1d_t),
                            NAME(strided_output_1d_t));
}

/* Fused BN + add + ReLU, pass by pass: relu(bn(x) + residual), where the residual may have a batch norm of its own.

x is (rows, channels), a row for each pixel of each image. A pass works on a chunk of rows, VECTORS vectors of channels
at a time. */

#define VECTORS (CHANNEL_BLOCK / SIMD_WIDTH)
#define FOR_EACH_ROW for (Py_ssize_t row = start, at = start * channels + channel; row < end; row++, at += channels)
#define FOR_EACH_VECTOR for (int v = 0; v < VECTORS; v++)
#define BN_ARGS const struct bn_relu copy = *(const struct bn_relu *)given, *const args = &copy; /* not aliased */
#define FOR_EACH_CHANNEL_BLOCK                                                                               \
    const Py_ssize_t channels = args->channels, start = chunk * args->chunk_rows;                            \
    const Py_ssize_t end = start + args->chunk_rows < args->rows ? start + args->chunk_rows : args->rows;    \
    for (Py_ssize_t channel = 0; channel < channels; channel += CHANNEL_BLOCK)
#define LOAD_BN_ROW(into, bn, row)                                                                           \
    FOR_EACH_VECTOR into[v] = LOAD(BN_ROW(bn, row, channels) + channel + v * SIMD_WIDTH)
#define STORE_PARTIAL(row, from)                                                                             \
    FOR_EACH_VECTOR STORE(args->partials + (chunk * PARTIALS + (row)) * channels + channel + v * SIMD_WIDTH, from[v])

/* Sums and sums of squares over a chunk, relative to its first row. */
TARGET static void NAME(bn_partial_stats)(const void *given, Py_ssize_t chunk)
{
    BN_ARGS
    FOR_EACH_CHANNEL_BLOCK {
        vector origin[VECTORS], total[VECTORS] = {0}, squares[VECTORS] = {0};
        FOR_EACH_VECTOR origin[v] = LOAD(args->x + start * channels + channel + v * SIMD_WIDTH);
        FOR_EACH_ROW FOR_EACH_VECTOR {
            const vector x = LOAD(args->x + at + v * SIMD_WIDTH) - origin[v];
            total[v] += x;
            squares[v] += x * x;
        }
        STORE_PARTIAL(0, total);
        STORE_PARTIAL(1, squares);
    }
}

/* For a block of channels: mean and (biased) variance from the partials of all chunks, then scale and shift; the running
   statistics follow, that of the variance unbiased. */
TARGET static void NAME(bn_finalize_stats)(const void *given, Py_ssize_t part)
{
    BN_ARGS
    const Py_ssize_t channels = args->channels, channel = part * CHANNEL_BLOCK;
    double mean[CHANNEL_BLOCK] = {0}, deviation[CHANNEL_BLOCK] = {0};
    for (int pass = 0; pass < 2; pass++)
        for (Py_ssize_t chunk = 0, start = 0; start < args->rows; chunk++, start += args->chunk_rows) {
            const double count = args->rows - start < args->chunk_rows ? args->rows - start : args->chunk_rows;
            const float *x = args->x + start * channels + channel;
            const float *partials = args->partials + chunk * PARTIALS * channels + channel;
            for (int c = 0; c < CHANNEL_BLOCK; c++) {
                const double total = partials[c], chunk_mean = x[c] + total / count;
                if (!pass)
                    mean[c] += chunk_mean * count / args->rows;
                else
                    deviation[c] += partials[channels + c] - total * total / count
                                    + count * (chunk_mean - mean[c]) * (chunk_mean - mean[c]);
            }
        }
    for (int c = 0; c < CHANNEL_BLOCK; c++) {
        float *at = args->bn + channel + c;
        const double variance = deviation[c] > 0 || deviation[c] != deviation[c] ? deviation[c] / args->rows : 0;
        const double inv_std = 1 / sqrt(variance + args->eps), scale = *BN_ROW(at, WEIGHT, channels) * inv_std;
        *BN_ROW(at, MEAN, channels) = (float)mean[c];
        *BN_ROW(at, VARIANCE, channels) = (float)variance;
        *BN_ROW(at, INV_STD, channels) = (float)inv_std;
        *BN_ROW(at, SCALE, channels) = (float)scale;
        *BN_ROW(at, SHIFT, channels) = (float)(*BN_ROW(at, BIAS, channels) - mean[c] * scale);
        if (args->running_mean) {
            float *running_mean = args->running_mean + channel + c, *running_var = args->running_var + channel + c;
            *running_mean += (float)(args->momentum * (mean[c] - *running_mean));
            *running_var += (float)(args->momentum * (variance * args->rows / (args->rows - 1) - *running_var));
        }
    }
}

TARGET static void NAME(bn_add_relu)(const void *given, Py_ssize_t chunk)
{
    BN_ARGS
    FOR_EACH_CHANNEL_BLOCK {
        vector scale[VECTORS], shift[VECTORS], residual_scale[VECTORS], residual_shift[VECTORS];
        LOAD_BN_ROW(scale, args->bn, SCALE);
        LOAD_BN_ROW(shift, args->bn, SHIFT);
        if (args->residual_bn) {
            LOAD_BN_ROW(residual_scale, args->residual_bn, SCALE);
            LOAD_BN_ROW(residual_shift, args->residual_bn, SHIFT);
        }
        FOR_EACH_ROW FOR_EACH_VECTOR {
            vector y = LOAD(args->x + at + v * SIMD_WIDTH) * scale[v] + shift[v];
            if (args->residual_bn)
                y += LOAD(args->residual + at + v * SIMD_WIDTH) * residual_scale[v] + residual_shift[v];
            else if (args->residual)
                y += LOAD(args->residual + at + v * SIMD_WIDTH);
            STORE(args->y + at + v * SIMD_WIDTH, RELU(y));
        }
    }
}

/* grad_out through the ReLU: where y, given or recomputed, is positive. */
#define GRAD_THROUGH_RELU                                                                                    \
    const vector x = LOAD(args->x + at + v * SIMD_WIDTH);                                                    \
    const vector y = args->y ? LOAD(args->y + at + v * SIMD_WIDTH) : (vector)(x * scale[v] + shift[v]);      \
    const vector grad = WHERE(~(y <= 0), LOAD(args->grad_out + at + v * SIMD_WIDTH));

/* Sums over a chunk of that gradient, of it times (x - mean) and, where the residual has a batch norm, of it times
   (residual - mean); also stores the gradient itself if grad_residual is given. */
TARGET static void NAME(bn_grad_partials)(const void *given, Py_ssize_t chunk)
{
    BN_ARGS
    FOR_EACH_CHANNEL_BLOCK {
        vector scale[VECTORS], shift[VECTORS], mean[VECTORS], residual_mean[VECTORS] = {0};
        vector total[VECTORS] = {0}, grad_dot_x[VECTORS] = {0}, grad_dot_residual[VECTORS] = {0};
        LOAD_BN_ROW(scale, args->bn, SCALE);
        LOAD_BN_ROW(shift, args->bn, SHIFT);
        LOAD_BN_ROW(mean, args->bn, MEAN);
        if (args->residual_bn)
            LOAD_BN_ROW(residual_mean, args->residual_bn, MEAN);
        FOR_EACH_ROW FOR_EACH_VECTOR {
            GRAD_THROUGH_RELU
            total[v] += grad;
            grad_dot_x[v] += grad * (x - mean[v]);
            if (args->residual_bn)
                grad_dot_residual[v] += grad * (LOAD(args->residual + at + v * SIMD_WIDTH) - residual_mean[v]);
            if (args->grad_residual)
                STORE(args->grad_residual + at + v * SIMD_WIDTH, grad);
        }
        STORE_PARTIAL(0, total);
        STORE_PARTIAL(1, grad_dot_x);
        STORE_PARTIAL(2, grad_dot_residual);
    }
}

/* For a block of channels: gradients of weight and bias from the partials of all chunks, and what grad_input needs. */
TARGET static void NAME(bn_finalize_grad)(const void *given, Py_ssize_t part)
{
    BN_ARGS
    const Py_ssize_t channels = args->channels, channel = part * CHANNEL_BLOCK;
    double partials[PARTIALS][CHANNEL_BLOCK] = {0};
    for (Py_ssize_t chunk = 0; chunk * args->chunk_rows < args->rows; chunk++)
        for (int row = 0; row < (args->residual_bn ? 3 : 2); row++)
            for (int c = 0; c < CHANNEL_BLOCK; c++)
                partials[row][c] += args->partials[(chunk * PARTIALS + row) * channels + channel + c];
    for (int which = 0; which < (args->residual_bn ? 2 : 1); which++)
        for (int c = 0; c < CHANNEL_BLOCK; c++) {
            float *at = (which ? args->residual_bn : args->bn) + channel + c;
            const double inv_std = *BN_ROW(at, INV_STD, channels), grad_dot_x = partials[which + 1][c] * inv_std;
            *BN_ROW(at, GRAD_BIAS, channels) = (float)partials[0][c];
            *BN_ROW(at, GRAD_WEIGHT, channels) = (float)grad_dot_x;
            *BN_ROW(at, GRAD_MEAN, channels) = (float)(partials[0][c] / args->rows);
            *BN_ROW(at, GRAD_SLOPE, channels) = (float)(grad_dot_x * inv_std / args->rows);
        }
}

/* grad_x = scale * (grad - grad_mean - grad_slope * (x - mean)), the coefficients per channel. */
TARGET static void NAME(bn_grad_input)(const void *given, Py_ssize_t chunk)
{
    BN_ARGS
    FOR_EACH_CHANNEL_BLOCK {
        vector scale[VECTORS], shift[VECTORS], mean[VECTORS], grad_mean[VECTORS], grad_slope[VECTORS];
        LOAD_BN_ROW(scale, args->bn, SCALE);
        LOAD_BN_ROW(shift, args->bn, SHIFT);
        LOAD_BN_ROW(mean, args->bn, MEAN);
        LOAD_BN_ROW(grad_mean, args->bn, GRAD_MEAN);
        LOAD_BN_ROW(grad_slope, args->bn, GRAD_SLOPE);
        FOR_EACH_ROW FOR_EACH_VECTOR {
            GRAD_THROUGH_RELU
            STORE(args->grad_x + at + v * SIMD_WIDTH, scale[v] * (grad - grad_mean[v] - grad_slope[v] * (x - mean[v])));
        }
    }
}

/* Batch norm, a sum and ReLU in one, pass by pass: relu(norm(x) + plus), where plus may have a norm of its own.

Rows are places, columns channels. A piece of some rows at a time, GROUP vectors of channels at a time. */

#define GROUP (CHANNELS / LANES)
#define FOR_EACH_ROW for (Py_ssize_t row = start, at = start * columns + channel; row < end; row++, at += columns)
#define FOR_EACH_VECTOR for (int v = 0; v < GROUP; v++)
#define NORM const struct norm own = *(const struct norm *)given, *const norm = &own; /* that no store can change */
#define PIECE                                                                                              \
    const Py_ssize_t columns = norm->columns, start = piece * norm->rows_each;                             \
    const Py_ssize_t end = start + norm->rows_each < norm->rows ? start + norm->rows_each : norm->rows;    \
    for (Py_ssize_t channel = 0; channel < columns; channel += CHANNELS)
#define TAKE(into, of, row) FOR_EACH_VECTOR into[v] = LOAD(OF(of, row, columns) + channel + v * LANES)
#define SUM(row, from)                                                                                     \
    FOR_EACH_VECTOR STORE(norm->sums + (piece * SUMS + (row)) * columns + channel + v * LANES, from[v])

/* Sums and sums of squares of a piece, as differences to its first row. */
TARGET static void NAME(moments)(const void *given, Py_ssize_t piece)
{
    NORM
    PIECE {
        vector shift[GROUP], sum[GROUP] = {0}, squares[GROUP] = {0};
        FOR_EACH_VECTOR shift[v] = LOAD(norm->x + start * columns + channel + v * LANES);
        FOR_EACH_ROW FOR_EACH_VECTOR {
            const vector x = LOAD(norm->x + at + v * LANES) - shift[v];
            sum[v] += x;
            squares[v] += x * x;
        }
        SUM(0, sum);
        SUM(1, squares);
    }
}

/* Of some channels: mean and variance (of all, not unbiased) from the pieces' sums, and what normalizes. */
TARGET static void NAME(settle)(const void *given, Py_ssize_t part)
{
    NORM
    const Py_ssize_t columns = norm->columns, channel = part * CHANNELS;
    double mean[CHANNELS] = {0}, far[CHANNELS] = {0};
    for (int pass = 0; pass < 2; pass++)
        for (Py_ssize_t piece = 0, start = 0; start < norm->rows; piece++, start += norm->rows_each) {
            const double count = norm->rows - start < norm->rows_each ? norm->rows - start : norm->rows_each;
            const float *x = norm->x + start * columns + channel;
            const float *sums = norm->sums + piece * SUMS * columns + channel;
            for (int c = 0; c < CHANNELS; c++) {
                const double sum = sums[c], here = x[c] + sum / count;
                if (!pass)
                    mean[c] += here * count / norm->rows;
                else
                    far[c] += sums[columns + c] - sum * sum / count + count * (here - mean[c]) * (here - mean[c]);
            }
        }
    for (int c = 0; c < CHANNELS; c++) {
        float *at = norm->norm + channel + c;
        const double variance = far[c] > 0 || far[c] != far[c] ? far[c] / norm->rows : 0;
        const double inverse = 1 / sqrt(variance + norm->eps), scale = *OF(at, WEIGHT, columns) * inverse;
        *OF(at, MEAN, columns) = (float)mean[c];
        *OF(at, VARIANCE, columns) = (float)variance;
        *OF(at, INVERSE, columns) = (float)inverse;
        *OF(at, SCALE, columns) = (float)scale;
        *OF(at, OFFSET, columns) = (float)(*OF(at, BIAS, columns) - mean[c] * scale);
    }
}

TARGET static void NAME(normalize)(const void *given, Py_ssize_t piece)
{
    NORM
    PIECE {
        vector scale[GROUP], offset[GROUP], plus_scale[GROUP], plus_offset[GROUP];
        TAKE(scale, norm->norm, SCALE);
        TAKE(offset, norm->norm, OFFSET);
        if (norm->plus_norm) {
            TAKE(plus_scale, norm->plus_norm, SCALE);
            TAKE(plus_offset, norm->plus_norm, OFFSET);
        }
        FOR_EACH_ROW FOR_EACH_VECTOR {
            vector y = LOAD(norm->x + at + v * LANES) * scale[v] + offset[v];
            if (norm->plus_norm)
                y += LOAD(norm->plus + at + v * LANES) * plus_scale[v] + plus_offset[v];
            else if (norm->plus)
                y += LOAD(norm->plus + at + v * LANES);
            STORE(norm->y + at + v * LANES, RECTIFIED(y));
        }
    }
}

/* The gradient that passes the ReLU: where y, given or computed as above, is above zero. */
#define PASSED                                                                                             \
    const vector x = LOAD(norm->x + at + v * LANES);                                                       \
    const vector y = norm->y ? LOAD(norm->y + at + v * LANES) : (vector)(x * scale[v] + offset[v]);        \
    const vector gradient = WHERE(~(y <= 0), LOAD(norm->gradient + at + v * LANES));

/* Sums of that gradient, and of it times the differences of x, and of a normalized plus, to their means; the gradient
   itself where it is wanted. */
TARGET static void NAME(sums_of_gradient)(const void *given, Py_ssize_t piece)
{
    NORM
    PIECE {
        vector scale[GROUP], offset[GROUP], mean[GROUP], plus_mean[GROUP] = {0};
        vector sum[GROUP] = {0}, product[GROUP] = {0}, other[GROUP] = {0};
        TAKE(scale, norm->norm, SCALE);
        TAKE(offset, norm->norm, OFFSET);
        TAKE(mean, norm->norm, MEAN);
        if (norm->plus_norm)
            TAKE(plus_mean, norm->plus_norm, MEAN);
        FOR_EACH_ROW FOR_EACH_VECTOR {
            PASSED
            sum[v] += gradient;
            product[v] += gradient * (x - mean[v]);
            if (norm->plus_norm)
                other[v] += gradient * (LOAD(norm->plus + at + v * LANES) - plus_mean[v]);
            if (norm->of_plus)
                STORE(norm->of_plus + at + v * LANES, gradient);
        }
        SUM(0, sum);
        SUM(1, product);
        SUM(2, other);
    }
}

/* Of some channels: the gradients of weight and bias from the pieces' sums, and what the gradient of x takes. */
TARGET static void NAME(settle_gradient)(const void *given, Py_ssize_t part)
{
    NORM
    const Py_ssize_t columns = norm->columns, channel = part * CHANNELS;
    double sums[SUMS][CHANNELS] = {0};
    for (Py_ssize_t piece = 0; piece * norm->rows_each < norm->rows; piece++)
        for (int row = 0; row < (norm->plus_norm ? 3 : 2); row++)
            for (int c = 0; c < CHANNELS; c++)
                sums[row][c] += norm->sums[(piece * SUMS + row) * columns + channel + c];
    for (int which = 0; which < (norm->plus_norm ? 2 : 1); which++)
        for (int c = 0; c < CHANNELS; c++) {
            float *at = (which ? norm->plus_norm : norm->norm) + channel + c;
            const double inverse = *OF(at, INVERSE, columns), product = sums[which + 1][c] * inverse;
            *OF(at, OF_BIAS, columns) = (float)sums[0][c];
            *OF(at, OF_WEIGHT, columns) = (float)product;
            *OF(at, FIRST, columns) = (float)(sums[0][c] / norm->rows);
            *OF(at, SECOND, columns) = (float)(product * inverse / norm->rows);
        }
}

/* The gradient of x: scale * (gradient - first - second * (x - mean)); scale, first and second by channel. */
TARGET static void NAME(gradient_of_x)(const void *given, Py_ssize_t piece)
{
    NORM
    PIECE {
        vector scale[GROUP], offset[GROUP], mean[GROUP], first[GROUP], second[GROUP];
        TAKE(scale, norm->norm, SCALE);
        TAKE(offset, norm->norm, OFFSET);
        TAKE(mean, norm->norm, MEAN);
        TAKE(first, norm->norm, FIRST);
        TAKE(second, norm->norm, SECOND);
        FOR_EACH_ROW FOR_EACH_VECTOR {
            PASSED
            STORE(norm->of_x + at + v * LANES, scale[v] * (gradient - first[v] - second[v] * (x - mean[v])));
        }
    }
}

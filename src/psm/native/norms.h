/* Batch norm, a sum and ReLU in one, for vectors of LANES floats; included once for each instruction set.

Rows are places, columns channels. A piece of some rows at a time, GROUP vectors of channels at a time. */

#define vector NAME(norm_vector)
typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
#define bits NAME(norm_bits)
typedef int bits __attribute__((vector_size(LANES * sizeof(int)), aligned(4), may_alias));
#define WHERE(condition, value) ((vector)((condition) & (bits)(value))) /* zero elsewhere */
#define LOAD(place) (*(const vector *)(place))
#define STORE(place, value) (*(vector *)(place) = (value))
#define GROUP (CHANNELS / LANES)
#define FOR_EACH_ROW for (Py_ssize_t row = start, at = start * columns + channel; row < end; row++, at += columns)
#define FOR_EACH_VECTOR for (int v = 0; v < GROUP; v++)
#define PIECE                                                                                              \
    const Py_ssize_t columns = norm->columns, start = piece * norm->rows_each;                             \
    const Py_ssize_t end = start + norm->rows_each < norm->rows ? start + norm->rows_each : norm->rows;    \
    for (Py_ssize_t channel = 0; channel < columns; channel += CHANNELS)

/* Sums and sums of squares of a piece, as differences to its first row. */
TARGET static void NAME(moments)(const void *given, Py_ssize_t piece)
{
    const struct norm own = *(const struct norm *)given, *const norm = &own; /* that no store can change */
    PIECE {
        vector shift[GROUP], sum[GROUP], squares[GROUP];
        FOR_EACH_VECTOR {
            shift[v] = LOAD(norm->x + start * columns + channel + v * LANES);
            sum[v] = squares[v] = shift[v] - shift[v];
        }
        FOR_EACH_ROW FOR_EACH_VECTOR {
            const vector x = LOAD(norm->x + at + v * LANES) - shift[v];
            sum[v] += x;
            squares[v] += x * x;
        }
        float *found = norm->sums + piece * 2 * columns + channel;
        FOR_EACH_VECTOR {
            STORE(found + v * LANES, sum[v]);
            STORE(found + columns + v * LANES, squares[v]);
        }
    }
}

TARGET static void NAME(normalise)(const void *given, Py_ssize_t piece)
{
    const struct norm own = *(const struct norm *)given, *const norm = &own; /* that no store can change */
    PIECE {
        vector scale[GROUP], offset[GROUP];
        FOR_EACH_VECTOR {
            scale[v] = LOAD(norm->scale + channel + v * LANES);
            offset[v] = LOAD(norm->offset + channel + v * LANES);
        }
        FOR_EACH_ROW FOR_EACH_VECTOR {
            vector y = LOAD(norm->x + at + v * LANES) * scale[v] + offset[v];
            if (norm->plus)
                y += LOAD(norm->plus + at + v * LANES);
            STORE(norm->y + at + v * LANES, WHERE(~(y < 0), y));
        }
    }
}

/* The gradient that passes the ReLU: where y, given or computed as above, is above zero. */
#define PASSED                                                                                             \
    const vector x = LOAD(norm->x + at + v * LANES);                                                       \
    const vector y = norm->y ? LOAD(norm->y + at + v * LANES) : (vector)(x * scale[v] + offset[v]);        \
    const vector gradient = WHERE(~(y <= 0), LOAD(norm->gradient + at + v * LANES));

/* Sums of that gradient, and of it times the differences of x to its mean; the gradient itself where it is wanted. */
TARGET static void NAME(sums_of_gradient)(const void *given, Py_ssize_t piece)
{
    const struct norm own = *(const struct norm *)given, *const norm = &own; /* that no store can change */
    PIECE {
        vector scale[GROUP], offset[GROUP], mean[GROUP], sum[GROUP], product[GROUP];
        FOR_EACH_VECTOR {
            scale[v] = LOAD(norm->scale + channel + v * LANES);
            offset[v] = LOAD(norm->offset + channel + v * LANES);
            mean[v] = LOAD(norm->mean + channel + v * LANES);
            sum[v] = product[v] = mean[v] - mean[v];
        }
        FOR_EACH_ROW FOR_EACH_VECTOR {
            PASSED
            sum[v] += gradient;
            product[v] += gradient * (x - mean[v]);
            if (norm->of_plus)
                STORE(norm->of_plus + at + v * LANES, gradient);
        }
        float *found = norm->sums + piece * 2 * columns + channel;
        FOR_EACH_VECTOR {
            STORE(found + v * LANES, sum[v]);
            STORE(found + columns + v * LANES, product[v]);
        }
    }
}

/* The gradient of x: scale * (gradient - first - second * (x - mean)); scale, first and second by channel. */
TARGET static void NAME(gradient_of_x)(const void *given, Py_ssize_t piece)
{
    const struct norm own = *(const struct norm *)given, *const norm = &own; /* that no store can change */
    PIECE {
        vector scale[GROUP], offset[GROUP], mean[GROUP], first[GROUP], second[GROUP];
        FOR_EACH_VECTOR {
            scale[v] = LOAD(norm->scale + channel + v * LANES);
            offset[v] = LOAD(norm->offset + channel + v * LANES);
            mean[v] = LOAD(norm->mean + channel + v * LANES);
            first[v] = LOAD(norm->first + channel + v * LANES);
            second[v] = LOAD(norm->second + channel + v * LANES);
        }
        FOR_EACH_ROW FOR_EACH_VECTOR {
            PASSED
            STORE(norm->of_x + at + v * LANES, scale[v] * (gradient - first[v] - second[v] * (x - mean[v])));
        }
    }
}

#undef vector
#undef bits
#undef WHERE
#undef LOAD
#undef STORE
#undef GROUP
#undef FOR_EACH_ROW
#undef FOR_EACH_VECTOR
#undef PIECE
#undef PASSED

/* Similarities (dot products) of queries with all rows of a bank, reduced without writing the matrix. A part is a group
of queries, packed in pairs of vectors; rows are read in blocks. The register tile is that of gemm in winograd.h. */

INLINE NAME(dots)(const float *rows, const float *queries, Py_ssize_t dim, int num_rows, vector (*sums)[2])
{
    for (int r = 0; r < num_rows; r++)
        sums[r][0] = sums[r][1] = (vector){0};
    for (Py_ssize_t k = 0; k < dim; k++, queries += NAME(GEMM_COLUMNS)) {
        const vector low = LOAD(queries), high = LOAD(queries + SIMD_WIDTH);
        for (int r = 0; r < num_rows; r++) {
            const float factor = rows[r * dim + k];
            sums[r][0] += factor * low;
            sums[r][1] += factor * high;
        }
    }
}

/* Prefetches `floats` floats of later rows, a share of them with each pair of vectors of queries: after a training step
   nothing of the bank is in the cache. Prefetching past the last row reads nothing. */
INLINE NAME(prefetch)(const float *rows, Py_ssize_t offset, Py_ssize_t floats, Py_ssize_t query, Py_ssize_t queries)
{
    enum { CACHE_LINE = 16 };
    const Py_ssize_t step = queries / NAME(GEMM_COLUMNS) * CACHE_LINE;
    const uintptr_t address = (uintptr_t)rows + offset * sizeof(float); /* an integer: it may lie past the last row */
    for (Py_ssize_t k = query / NAME(GEMM_COLUMNS) * CACHE_LINE; k < floats; k += step)
        __builtin_prefetch((const void *)(address + k * sizeof(float)), 0, 2);
}

#define MIN(one, other) ((one) < (other) ? (one) : (other))
#define SELECT(condition, one, other) ((vector)(((condition) & (bits)(one)) | (~(condition) & (bits)(other))))
#define VECTOR_MAX(one, other) SELECT(((one) > (other)) | ((one) != (one)), one, other) /* NaN stays NaN */

/* Calls f(count) for `row` from first to last, GEMM_ROWS rows at a time, then one at a time. */
#define FOR_ROWS(first, last, f)                                                                             \
    for (Py_ssize_t row = (first); row < (last);)                                                            \
        if (row + NAME(GEMM_ROWS) <= (last)) {                                                               \
            f(NAME(GEMM_ROWS));                                                                              \
            row += NAME(GEMM_ROWS);                                                                          \
        } else {                                                                                             \
            f(1);                                                                                            \
            row++;                                                                                           \
        }

/* Top-k, largest first: the maximum of each block of rows, then the k blocks with the largest maxima once more. */

INLINE NAME(insert)(float value, int index, Py_ssize_t k, float *values, int *indices)
{
    Py_ssize_t at = k;
    for (; at && (value > values[at - 1] || value != value); at--)
        if (at < k) {
            values[at] = values[at - 1];
            indices[at] = indices[at - 1];
        }
    if (at < k) {
        values[at] = value;
        indices[at] = index;
    }
}

INLINE NAME(clear)(Py_ssize_t k, float *values, int *indices)
{
    for (Py_ssize_t i = 0; i < k; i++) {
        values[i] = -INFINITY;
        indices[i] = 0;
    }
}

INLINE NAME(update_block_max)(const struct topk *args, Py_ssize_t row, int rows, Py_ssize_t column, vector *largest)
{
    vector sums[NAME(GEMM_ROWS)][2];
    NAME(dots)(args->rows + row * args->dim, args->queries + column * args->dim, args->dim, rows, sums);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++) {
            vector value = sums[r][v];
            if (args->ids) {
                const bits query_ids = *(const bits *)(args->exclude_ids + column + v * SIMD_WIDTH);
                value = SELECT(query_ids == args->ids[row + r], SPLAT(-INFINITY), value);
            }
            largest[v] = VECTOR_MAX(value, largest[v]);
        }
}

INLINE NAME(insert_rows)(const struct topk *args, Py_ssize_t row, int rows, Py_ssize_t query)
{
    const Py_ssize_t column = query / NAME(GEMM_COLUMNS) * NAME(GEMM_COLUMNS), k = args->k;
    vector sums[NAME(GEMM_ROWS)][2];
    NAME(dots)(args->rows + row * args->dim, args->queries + column * args->dim, args->dim, rows, sums);
    for (int r = 0; r < rows; r++)
        if (!args->ids || args->ids[row + r] != args->exclude_ids[query])
            NAME(insert)(((const float *)sums[r])[query - column], (int)(row + r), k, args->values + query * k,
                         args->indices + query * k);
}

TARGET static void NAME(topk_similarity)(const void *given, Py_ssize_t part)
{
    const struct topk copy = *(const struct topk *)given, *const args = &copy;
    const Py_ssize_t first = part * args->group, k = args->k, size = args->block;
    const Py_ssize_t blocks = (args->num_rows + size - 1) / size;
    const Py_ssize_t last = MIN(first + args->group, args->num_queries);
    float *const block_max = args->block_max + first * blocks;
    for (Py_ssize_t block = 0; block < blocks; block++)
        for (Py_ssize_t column = first; column < last; column += NAME(GEMM_COLUMNS)) {
            const Py_ssize_t start = block * size, end = MIN(start + size, args->num_rows);
            float *const at = block_max + block * (last - first) + column - first;
            vector largest[2] = {SPLAT(-INFINITY), SPLAT(-INFINITY)};
            NAME(prefetch)(args->rows, (start + 4 * size) * args->dim, size * args->dim, column - first, last - first);
#define UPDATE_BLOCK_MAX(rows) NAME(update_block_max)(args, row, rows, column, largest)
            FOR_ROWS(start, end, UPDATE_BLOCK_MAX)
            STORE(at, largest[0]);
            STORE(at + SIMD_WIDTH, largest[1]);
        }
    for (Py_ssize_t query = first; query < last; query++) {
        float *const values = args->values + query * k;
        int *const top_blocks = args->top_blocks + query * k;
        NAME(clear)(k, values, top_blocks);
        for (Py_ssize_t block = 0; block < blocks; block++)
            NAME(insert)(block_max[block * (last - first) + query - first], (int)block, k, values, top_blocks);
        Py_ssize_t found = 0; /* blocks with a row that is not excluded */
        while (found < k && values[found] != -INFINITY)
            found++;
        NAME(clear)(k, values, args->indices + query * k);
        for (Py_ssize_t i = 0; i < found; i++) {
            const Py_ssize_t start = top_blocks[i] * size, end = MIN(start + size, args->num_rows);
#define INSERT_ROWS(rows) NAME(insert_rows)(args, row, rows, query)
            FOR_ROWS(start, end, INSERT_ROWS)
        }
    }
}

/* Log-sum-exp: the sum of exp(similarity - max) and the sum of rows with these weights. `max` is a running reference,
   raised when a similarity exceeds it by more than 16. */

/* exp(x) for x < 88, to two ulp: 2^n through the exponent's bits, the rest by a polynomial. */
INLINE NAME(exp)(vector x, vector *result)
{
    const float round = 12582912.f; /* 1.5 * 2^23: adding it rounds to a whole number, held in the last bits */
    x = SELECT(x < -80.f, SPLAT(-80.f), x); /* negligible beside 1, and no denormals */
    const vector shifted = x * 1.44269504f + round, n = shifted - round;
    x -= n * .693359375f; /* n * log(2) in two parts */
    x += n * 2.12194440e-4f;
    const vector square = x * x, low = x * 1.6666665459e-1f + 5.0000001201e-1f;
    const vector middle = x * 8.3334519073e-3f + 4.1665795894e-2f, high = x * 1.9875691500e-4f + 1.3981999507e-3f;
    const vector y = ((high * square + middle) * square + low) * square + (x + 1.f);
    *result = (vector)((bits)y + ((bits)shifted << 23));
}

/* Raises the reference of SIMD_WIDTH queries to the largest similarity, if that is larger, and rescales the sums. */
INLINE NAME(raise_max)(const struct logsumexp *args, Py_ssize_t query, vector largest)
{
    float *const max = args->max + query, *const total = args->total + query;
    vector scale;
    largest = VECTOR_MAX(largest, LOAD(max));
    NAME(exp)(LOAD(max) - largest, &scale);
    STORE(max, largest);
    STORE(total, LOAD(total) * scale);
    for (int lane = 0; lane < SIMD_WIDTH; lane++)
        for (Py_ssize_t k = 0; k < args->dim; k += SIMD_WIDTH) {
            float *const mean = args->mean + (query + lane) * args->dim + k;
            STORE(mean, LOAD(mean) * scale[lane]);
        }
}

/* Sets result to 1 if any of the largest similarities exceeds its reference by more than 16. */
INLINE NAME(exceeds)(const vector *largest, const float *max, int *result)
{
    *result = 0;
    for (int v = 0; v < 2; v++) {
        const bits within = largest[v] <= LOAD(max + v * SIMD_WIDTH) + 16;
        for (int lane = 0; lane < SIMD_WIDTH; lane++)
            *result |= !within[lane];
    }
}

/* Weights exp(similarity - max) of a block of rows for a pair of vectors of queries. */
INLINE NAME(softmax_weights)(const struct logsumexp *args, const float *block, Py_ssize_t rows, Py_ssize_t query,
                             float *weights)
{
    const Py_ssize_t dim = args->dim;
    for (int again = 1, exceeds; again; again = again == 1 && exceeds ? 2 : 0) {
        const vector max[2] = {LOAD(args->max + query), LOAD(args->max + query + SIMD_WIDTH)};
        vector largest[2] = {SPLAT(-INFINITY), SPLAT(-INFINITY)}, added[2] = {0}, sums[NAME(GEMM_ROWS)][2];
#define WEIGHTS_OF(count)                                                                                    \
    NAME(dots)(block + row * dim, args->queries + query * dim, dim, count, sums);                            \
    for (int r = 0; r < count; r++)                                                                          \
        for (int v = 0; v < 2; v++) {                                                                        \
            largest[v] = VECTOR_MAX(sums[r][v], largest[v]);                                                 \
            NAME(exp)(sums[r][v] - max[v], &sums[r][v]);                                                     \
            added[v] += sums[r][v];                                                                          \
            STORE(weights + (row + r) * MAX_QUERIES + v * SIMD_WIDTH, sums[r][v]);                           \
        }
        FOR_ROWS(0, rows, WEIGHTS_OF)
        NAME(exceeds)(largest, args->max + query, &exceeds);
        for (int v = 0; v < 2; v++) {
            float *const total = args->total + query + v * SIMD_WIDTH;
            if (again == 1 && exceeds)
                NAME(raise_max)(args, query + v * SIMD_WIDTH, largest[v]);
            else
                STORE(total, LOAD(total) + added[v]);
        }
    }
}

/* Adds the weighted sum of a block of rows, a pair of vectors of columns, to the means of some queries. */
INLINE NAME(accumulate)(const float *weights, const float *rows, float *mean, Py_ssize_t count, Py_ssize_t dim,
                        int queries)
{
    vector sums[NAME(GEMM_ROWS)][2] = {0};
    for (Py_ssize_t r = 0; r < count; r++) {
        const vector low = LOAD(rows + r * dim), high = LOAD(rows + r * dim + SIMD_WIDTH);
        for (int q = 0; q < queries; q++) {
            const float weight = weights[r * MAX_QUERIES + q];
            sums[q][0] += weight * low;
            sums[q][1] += weight * high;
        }
    }
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < 2; v++)
            STORE(mean + q * dim + v * SIMD_WIDTH, LOAD(mean + q * dim + v * SIMD_WIDTH) + sums[q][v]);
}

TARGET static void NAME(logsumexp_similarity)(const void *given, Py_ssize_t part)
{
    const struct logsumexp copy = *(const struct logsumexp *)given, *const args = &copy;
    const Py_ssize_t dim = args->dim, first = part * args->group, queries = MIN(args->group, args->num_queries - first);
    float weights[ROW_BLOCK * MAX_QUERIES];
    memset(args->mean + first * dim, 0, queries * dim * sizeof(float));
    for (Py_ssize_t query = first; query < first + queries; query++) {
        args->max[query] = -INFINITY;
        args->total[query] = 0;
    }
    for (Py_ssize_t start = 0; start < args->num_rows; start += ROW_BLOCK) {
        const Py_ssize_t rows = MIN(ROW_BLOCK, args->num_rows - start);
        const float *const block = args->rows + start * dim;
        for (Py_ssize_t query = 0; query < queries; query += NAME(GEMM_COLUMNS)) {
            NAME(prefetch)(block, ROW_BLOCK * dim, ROW_BLOCK * dim, query, queries);
            NAME(softmax_weights)(args, block, rows, first + query, weights + query);
        }
        for (Py_ssize_t query = 0, some; query < queries; query += some) {
            float *const mean = args->mean + (first + query) * dim;
            /* GEMM_T_ROWS until GEMM_ROWS divides the rest */
            some = (queries - query) % NAME(GEMM_ROWS) ? NAME(GEMM_T_ROWS) : NAME(GEMM_ROWS);
            for (Py_ssize_t k = 0; k < dim; k += NAME(GEMM_COLUMNS))
                if (some == NAME(GEMM_ROWS))
                    NAME(accumulate)(weights + query, block + k, mean + k, rows, dim, NAME(GEMM_ROWS));
                else
                    NAME(accumulate)(weights + query, block + k, mean + k, rows, dim, NAME(GEMM_T_ROWS));
        }
    }
}

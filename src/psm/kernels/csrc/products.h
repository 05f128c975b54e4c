/* Products of queries with all rows of a bank, of which only what is wanted is kept. A part is a group of queries,
which lie in pairs of vectors; rows pass by in blocks.

Rows and vectors at a time are those of the products in tiles.h. */

LINE NAME(dots)(const float *rows, const float *queries, Py_ssize_t inner, int count, vector (*sums)[2])
{
    for (int r = 0; r < count; r++)
        sums[r][0] = sums[r][1] = (vector){0};
    for (Py_ssize_t k = 0; k < inner; k++, queries += NAME(PAIR)) {
        const vector low = LOAD(queries), high = LOAD(queries + LANES);
        for (int r = 0; r < count; r++) {
            const float factor = rows[r * inner + k];
            sums[r][0] += factor * low;
            sums[r][1] += factor * high;
        }
    }
}

/* Has floats that come later brought nearer, with each pair of several queries a share of them: a step leaves none of
   a bank in the cache. Those past the last row are not read. */
LINE NAME(expect)(const float *later, Py_ssize_t floats, Py_ssize_t query, Py_ssize_t queries)
{
    enum { LINE_OF_CACHE = 16 };
    for (Py_ssize_t k = query / NAME(PAIR) * LINE_OF_CACHE; k < floats; k += queries / NAME(PAIR) * LINE_OF_CACHE)
        __builtin_prefetch(later + k, 0, 2);
}

#define LESSER(one, other) ((one) < (other) ? (one) : (other))
#define EITHER(condition, one, other) ((vector)(((condition) & (bits)(one)) | (~(condition) & (bits)(other))))
#define LARGER(one, other) EITHER(((one) > (other)) | ((one) != (one)), one, other) /* what is no number stays so */

/* The rows `first` and after it, so many at a time: of(rows). */
#define FOR_ROWS(first, last, of)                                                                            \
    for (Py_ssize_t row = (first); row < (last);)                                                            \
        if (row + NAME(ROWS) <= (last)) {                                                                    \
            of(NAME(ROWS));                                                                                  \
            row += NAME(ROWS);                                                                               \
        } else {                                                                                             \
            of(1);                                                                                           \
            row++;                                                                                           \
        }

/* The k largest of each query, the largest first: maxima of all blocks of rows, then the blocks that have the k largest
   of these once more. */

LINE NAME(insert)(float value, int place, Py_ssize_t k, float *values, int *places)
{
    Py_ssize_t at = k;
    for (; at && (value > values[at - 1] || value != value); at--)
        if (at < k) {
            values[at] = values[at - 1];
            places[at] = places[at - 1];
        }
    if (at < k) {
        values[at] = value;
        places[at] = place;
    }
}

LINE NAME(clear)(Py_ssize_t k, float *values, int *places)
{
    for (Py_ssize_t i = 0; i < k; i++) {
        values[i] = -INFINITY;
        places[i] = 0;
    }
}

LINE NAME(compare)(const struct search *search, Py_ssize_t row, int rows, Py_ssize_t column, vector *largest)
{
    vector sums[NAME(ROWS)][2];
    NAME(dots)(search->rows + row * search->inner, search->queries + column * search->inner, search->inner, rows, sums);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++) {
            vector value = sums[r][v];
            if (search->ids) {
                const bits own = *(const bits *)(search->own + column + v * LANES) == search->ids[row + r];
                value = EITHER(own, VECTOR(-INFINITY), value);
            }
            largest[v] = LARGER(value, largest[v]);
        }
}

LINE NAME(consider)(const struct search *search, Py_ssize_t row, int rows, Py_ssize_t query)
{
    const Py_ssize_t column = query / NAME(PAIR) * NAME(PAIR), k = search->k;
    vector sums[NAME(ROWS)][2];
    NAME(dots)(search->rows + row * search->inner, search->queries + column * search->inner, search->inner, rows, sums);
    for (int r = 0; r < rows; r++)
        if (!search->ids || search->ids[row + r] != search->own[query])
            NAME(insert)(((const float *)sums[r])[query - column], (int)(row + r), k, search->values + query * k,
                         search->places + query * k);
}

TARGET static void NAME(search)(const void *given, Py_ssize_t part)
{
    const struct search copy = *(const struct search *)given, *const search = &copy;
    const Py_ssize_t first = part * search->group, k = search->k, size = search->block;
    const Py_ssize_t blocks = (search->count + size - 1) / size;
    const Py_ssize_t last = LESSER(first + search->group, search->columns);
    float *const maxima = search->maxima + first * blocks;
    for (Py_ssize_t block = 0; block < blocks; block++)
        for (Py_ssize_t column = first; column < last; column += NAME(PAIR)) {
            const Py_ssize_t start = block * size, end = LESSER(start + size, search->count);
            float *const at = maxima + block * (last - first) + column - first;
            vector largest[2] = {VECTOR(-INFINITY), VECTOR(-INFINITY)};
            NAME(expect)(search->rows + (start + 4 * size) * search->inner, size * search->inner, column - first,
                         last - first);
#define COMPARE(rows) NAME(compare)(search, row, rows, column, largest)
            FOR_ROWS(start, end, COMPARE)
            STORE(at, largest[0]);
            STORE(at + LANES, largest[1]);
        }
    for (Py_ssize_t query = first; query < last; query++) {
        float *const values = search->values + query * k;
        int *const chosen = search->chosen + query * k;
        NAME(clear)(k, values, chosen);
        for (Py_ssize_t block = 0; block < blocks; block++)
            NAME(insert)(maxima[block * (last - first) + query - first], (int)block, k, values, chosen);
        Py_ssize_t there = 0; /* blocks of which a row may be wanted */
        while (there < k && values[there] != -INFINITY)
            there++;
        NAME(clear)(k, values, search->places + query * k);
        for (Py_ssize_t i = 0; i < there; i++) {
            const Py_ssize_t start = chosen[i] * size, end = LESSER(start + size, search->count);
#define CONSIDER(rows) NAME(consider)(search, row, rows, query)
            FOR_ROWS(start, end, CONSIDER)
        }
    }
}

/* The sum of exp over all rows, and the sum of rows with these weights; both over exp of a query's level, which is near
   the largest product so far. */

/* exp of what is below 88, to two units in the last place: 2^n by its bits, the rest by a polynomial. */
LINE NAME(exponential)(vector x, vector *result)
{
    const float whole = 12582912.f; /* to which a float adds whole numbers only, in its last bits */
    x = EITHER(x < -80.f, VECTOR(-80.f), x); /* beside 1 nothing, and its products are no denormals */
    const vector shifted = x * 1.44269504f + whole, n = shifted - whole;
    x -= n * .693359375f; /* n log 2 in two steps */
    x += n * 2.12194440e-4f;
    const vector square = x * x, low = x * 1.6666665459e-1f + 5.0000001201e-1f;
    const vector middle = x * 8.3334519073e-3f + 4.1665795894e-2f, high = x * 1.9875691500e-4f + 1.3981999507e-3f;
    const vector y = ((high * square + middle) * square + low) * square + (x + 1.f);
    *result = (vector)((bits)y + ((bits)shifted << 23));
}

/* The level of LANES queries rises to the largest product, if that is above it. */
LINE NAME(rise)(const struct sum *sum, Py_ssize_t query, vector largest)
{
    float *const level = sum->level + query, *const total = sum->total + query;
    vector scale;
    largest = LARGER(largest, LOAD(level));
    NAME(exponential)(LOAD(level) - largest, &scale);
    STORE(level, largest);
    STORE(total, LOAD(total) * scale);
    for (int lane = 0; lane < LANES; lane++)
        for (Py_ssize_t k = 0; k < sum->inner; k += LANES) {
            float *const mean = sum->mean + (query + lane) * sum->inner + k;
            STORE(mean, LOAD(mean) * scale[lane]);
        }
}

/* Whether a pair of largest products is anywhere too far above its levels for what exp of it would leave of others. */
LINE NAME(above)(const vector *largest, const float *level, int *result)
{
    *result = 0;
    for (int v = 0; v < 2; v++) {
        const bits within = largest[v] <= LOAD(level + v * LANES) + 16;
        for (int lane = 0; lane < LANES; lane++)
            *result |= !within[lane];
    }
}

/* Weights of a block of rows for a pair of vectors of queries: exp of their products. */
LINE NAME(weigh)(const struct sum *sum, const float *block, Py_ssize_t rows, Py_ssize_t query, float *weights)
{
    const Py_ssize_t inner = sum->inner;
    for (int again = 1, above; again; again = again == 1 && above ? 2 : 0) {
        const vector level[2] = {LOAD(sum->level + query), LOAD(sum->level + query + LANES)};
        vector largest[2] = {VECTOR(-INFINITY), VECTOR(-INFINITY)}, added[2] = {0}, sums[NAME(ROWS)][2];
#define WEIGH(count)                                                                                         \
    NAME(dots)(block + row * inner, sum->queries + query * inner, inner, count, sums);                       \
    for (int r = 0; r < count; r++)                                                                          \
        for (int v = 0; v < 2; v++) {                                                                        \
            largest[v] = LARGER(sums[r][v], largest[v]);                                                     \
            NAME(exponential)(sums[r][v] - level[v], &sums[r][v]);                                           \
            added[v] += sums[r][v];                                                                          \
            STORE(weights + (row + r) * QUERIES + v * LANES, sums[r][v]);                                    \
        }
        FOR_ROWS(0, rows, WEIGH)
        NAME(above)(largest, sum->level + query, &above);
        for (int v = 0; v < 2; v++) {
            float *const total = sum->total + query + v * LANES;
            if (again == 1 && above)
                NAME(rise)(sum, query + v * LANES, largest[v]);
            else
                STORE(total, LOAD(total) + added[v]);
        }
    }
}

/* What some queries see of a block of rows, a pair of vectors of it. */
LINE NAME(gather)(const float *weights, const float *rows, float *mean, Py_ssize_t count, Py_ssize_t inner, int queries)
{
    vector sums[NAME(ROWS)][2] = {0};
    for (Py_ssize_t r = 0; r < count; r++) {
        const vector low = LOAD(rows + r * inner), high = LOAD(rows + r * inner + LANES);
        for (int q = 0; q < queries; q++) {
            const float weight = weights[r * QUERIES + q];
            sums[q][0] += weight * low;
            sums[q][1] += weight * high;
        }
    }
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < 2; v++)
            STORE(mean + q * inner + v * LANES, LOAD(mean + q * inner + v * LANES) + sums[q][v]);
}

TARGET static void NAME(sum)(const void *given, Py_ssize_t part)
{
    const struct sum copy = *(const struct sum *)given, *const sum = &copy;
    const Py_ssize_t inner = sum->inner, first = part * sum->group, queries = LESSER(sum->group, sum->columns - first);
    float weights[TOGETHER * QUERIES];
    memset(sum->mean + first * inner, 0, queries * inner * sizeof(float));
    for (Py_ssize_t query = first; query < first + queries; query++) {
        sum->level[query] = -INFINITY;
        sum->total[query] = 0;
    }
    for (Py_ssize_t start = 0; start < sum->count; start += TOGETHER) {
        const Py_ssize_t rows = LESSER(TOGETHER, sum->count - start);
        const float *const block = sum->rows + start * inner;
        for (Py_ssize_t query = 0; query < queries; query += NAME(PAIR)) {
            NAME(expect)(block + TOGETHER * inner, TOGETHER * inner, query, queries);
            NAME(weigh)(sum, block, rows, first + query, weights + query);
        }
        for (Py_ssize_t query = 0, some; query < queries; query += some) {
            float *const mean = sum->mean + (first + query) * inner;
            some = (queries - query) % NAME(ROWS) ? NAME(TAPS) : NAME(ROWS); /* pairs of vectors divide into these */
            for (Py_ssize_t k = 0; k < inner; k += NAME(PAIR))
                if (some == NAME(ROWS))
                    NAME(gather)(weights + query, block + k, mean + k, rows, inner, NAME(ROWS));
                else
                    NAME(gather)(weights + query, block + k, mean + k, rows, inner, NAME(TAPS));
        }
    }
}

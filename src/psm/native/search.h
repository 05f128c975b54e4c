/* Similarities of rows and queries, with the largest of each block of rows. Queries lie in pairs of vectors.

Rows and vectors at a time are those of the products in tiles.h. */

LINE NAME(compare)(const struct search *search, Py_ssize_t row, int rows, Py_ssize_t column, vector *largest)
{
    const Py_ssize_t inner = search->inner, columns = search->columns;
    const float *from = search->rows + row * inner, *query = search->queries + column * inner;
    vector sums[NAME(ROWS)][2] = {0};
    for (Py_ssize_t k = 0; k < inner; k++, query += NAME(PAIR)) {
        const vector low = LOAD(query), high = LOAD(query + LANES);
        for (int r = 0; r < rows; r++) {
            const float factor = from[r * inner + k];
            sums[r][0] += factor * low;
            sums[r][1] += factor * high;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++) {
            const Py_ssize_t at = column + v * LANES;
            vector value = sums[r][v];
            if (search->ids) {
                const bits own = *(const bits *)(search->own + at) == search->ids[row + r];
                value = (vector)((own & (bits)(vector)(VECTOR(-INFINITY))) | (~own & (bits)value));
            }
            const bits larger = (value > largest[v]) | (value != value); /* what is no number stays so */
            largest[v] = (vector)((larger & (bits)value) | (~larger & (bits)largest[v]));
            STORE(search->similarity + (row + r) * columns + at, value);
        }
}

TARGET static void NAME(search)(const void *given, Py_ssize_t part)
{
    const struct search own = *(const struct search *)given, *const search = &own;
    const Py_ssize_t start = part * search->block;
    const Py_ssize_t end = start + search->block < search->count ? start + search->block : search->count;
    for (Py_ssize_t column = 0; column < search->columns; column += NAME(PAIR)) {
        vector largest[2] = {VECTOR(-INFINITY), VECTOR(-INFINITY)};
        Py_ssize_t row = start;
        for (; row + NAME(ROWS) <= end; row += NAME(ROWS))
            NAME(compare)(search, row, NAME(ROWS), column, largest);
        for (; row < end; row++)
            NAME(compare)(search, row, 1, column, largest);
        STORE(search->maxima + part * search->columns + column, largest[0]);
        STORE(search->maxima + part * search->columns + column + LANES, largest[1]);
    }
}

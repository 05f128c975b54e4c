/* Matrix products of planes. A part is some rows of a pair of vectors of columns of a plane: these columns of b are
packed, a block of rows at a time, and the register tile is that of gemm in winograd.h. */

INLINE NAME(plane_tile)(const float *a, const float *packed, float *c, const struct planes *args, Py_ssize_t inner,
                        int rows, int accumulate)
{
    vector sums[NAME(GEMM_ROWS)][2] = {0};
    for (int r = 0; accumulate && r < rows; r++) {
        sums[r][0] = LOAD(c + r * args->c_row);
        sums[r][1] = LOAD(c + r * args->c_row + SIMD_WIDTH);
    }
    for (Py_ssize_t k = 0; k < inner; k++, a += args->a_inner, packed += NAME(GEMM_COLUMNS)) {
        const vector low = LOAD(packed), high = LOAD(packed + SIMD_WIDTH);
        for (int r = 0; r < rows; r++) {
            const float factor = a[r * args->a_row];
            sums[r][0] += factor * low;
            sums[r][1] += factor * high;
        }
    }
    for (int r = 0; r < rows; r++) {
        STORE(c + r * args->c_row, sums[r][0]);
        STORE(c + r * args->c_row + SIMD_WIDTH, sums[r][1]);
    }
}

/* A pair of vectors of columns of b, row by row; b may be transposed. */
INLINE NAME(pack_columns)(const float *b, const struct planes *args, Py_ssize_t inner, float *packed)
{
    if (args->b_column == 1)
        for (Py_ssize_t k = 0; k < inner; k++)
            for (int v = 0; v < NAME(GEMM_COLUMNS); v += SIMD_WIDTH)
                STORE(packed + k * NAME(GEMM_COLUMNS) + v, LOAD(b + k * args->b_row + v));
    else
        for (int column = 0; column < NAME(GEMM_COLUMNS); column++)
            for (Py_ssize_t k = 0; k < inner; k++)
                packed[k * NAME(GEMM_COLUMNS) + column] = b[k * args->b_row + column * args->b_column];
}

TARGET static void NAME(plane_gemm)(const void *given, Py_ssize_t part)
{
    const struct planes copy = *(const struct planes *)given, *const args = &copy;
    const Py_ssize_t pairs = args->columns / NAME(GEMM_COLUMNS), groups = CEIL_DIV(args->rows, ROW_GROUP);
    const Py_ssize_t plane = part / groups / pairs, column = part / groups % pairs * NAME(GEMM_COLUMNS);
    const Py_ssize_t first = part % groups * ROW_GROUP, last = MIN(first + ROW_GROUP, args->rows);
    float packed[INNER_BLOCK * NAME(GEMM_COLUMNS)];
    for (Py_ssize_t start = 0; start < args->inner; start += INNER_BLOCK) {
        const Py_ssize_t inner = MIN(INNER_BLOCK, args->inner - start);
        const float *const b = args->b + plane * args->b_plane + start * args->b_row + column * args->b_column;
        NAME(pack_columns)(b, args, inner, packed);
        for (Py_ssize_t row = first, some; row < last; row += some) {
            const Py_ssize_t rest = last - row;
            const float *const a = args->a + plane * args->a_plane + start * args->a_inner + row * args->a_row;
            float *const c = args->c + plane * args->c_plane + column + row * args->c_row;
            if (rest % NAME(GEMM_ROWS) == 0 || rest >= NAME(GEMM_ROWS) + NAME(GEMM_T_ROWS))
                NAME(plane_tile)(a, packed, c, args, inner, some = NAME(GEMM_ROWS), start > 0);
            else if (rest >= NAME(GEMM_T_ROWS))
                NAME(plane_tile)(a, packed, c, args, inner, some = NAME(GEMM_T_ROWS), start > 0);
            else
                NAME(plane_tile)(a, packed, c, args, inner, some = 1, start > 0);
        }
    }
}

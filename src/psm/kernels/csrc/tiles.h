/* 3x3 convolutions by tiles. The places that a tile sees lie in planes, one for each, (tiles, channels) each.

Maps may come through a norm, relu(norm(maps)), and gradients from one: both are computed where they are read. */

#define LINE TARGET static inline __attribute__((always_inline)) void

/* Along one line with stride 1: the points 0, +-2/3, +-3/2 and infinity, as in small_maps.PRODUCTS. */

LINE NAME(line_maps)(const vector *x, vector *tile)
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

LINE NAME(line_maps_transposed)(const vector *tile, vector *x)
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

LINE NAME(line_out)(const vector *tile, vector *y)
{
    const vector even = tile[1] + tile[2], odd = tile[1] - tile[2];
    const vector even_far = tile[3] + tile[4], odd_far = tile[3] - tile[4];
    y[0] = tile[0] + even + .25f * even_far;
    y[1] = 2.f / 3 * odd + .375f * odd_far;
    y[2] = 4.f / 9 * even + 9.f / 16 * even_far;
    y[3] = 8.f / 27 * odd + 27.f / 32 * odd_far + tile[5];
}

LINE NAME(line_out_transposed)(const vector *y, vector *tile)
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

/* Along one line with stride 2: every other place meets one tap and takes a product each, the first four of a tile;
   those between meet two taps, by the points 0, 1, -2/3, -3/2 and infinity. */

LINE NAME(line_strided_maps)(const vector *x, vector *tile)
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

LINE NAME(line_strided_maps_transposed)(const vector *tile, vector *x)
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

LINE NAME(line_strided_out)(const vector *tile, vector *y)
{
    y[0] = tile[0] + tile[4] + tile[5] + tile[6] + tile[7];
    y[1] = tile[1] + tile[5] - 2.f / 3 * tile[6] - 3.f / 2 * tile[7];
    y[2] = tile[2] + tile[5] + 4.f / 9 * tile[6] + 9.f / 4 * tile[7];
    y[3] = tile[3] + tile[5] - 8.f / 27 * tile[6] - 27.f / 8 * tile[7] + tile[8];
}

LINE NAME(line_strided_out_transposed)(const vector *y, vector *tile)
{
    for (int i = 0; i < OWN; i++)
        tile[i] = y[i];
    tile[4] = y[0];
    tile[5] = y[0] + y[1] + y[2] + y[3];
    tile[6] = y[0] - 2.f / 3 * y[1] + 4.f / 9 * y[2] - 8.f / 27 * y[3];
    tile[7] = y[0] - 3.f / 2 * y[1] + 9.f / 4 * y[2] - 27.f / 8 * y[3];
    tile[8] = y[3];
}

/* A tile of a map: down its columns, then along its rows, LANES of its channels at a time. `top` and `left` are its
   own first place; it sees `seen` places of a line, one before. */

typedef void NAME(line)(const vector *, vector *);

#define FOR_EACH_CHANNEL for (Py_ssize_t channel = 0; channel < channels; channel += LANES)
#define PLACE(y, x) (((y) * width + (x)) * channels + channel)
#define PLANE(i, j) (((i) * seen + (j)) * plane + channel)
#define INSIDE(y, x) ((size_t)(y) < (size_t)height && (size_t)(x) < (size_t)width)
#define ROW_OF(norm, row) ((norm) ? LOAD(OF(norm, row, channels) + channel) : (vector){0})

LINE NAME(to_tile)(const float *map, const float *norm, float *tile, Py_ssize_t height, Py_ssize_t width,
                   Py_ssize_t channels, Py_ssize_t top, Py_ssize_t left, Py_ssize_t plane, int seen, NAME(line) line)
{
    vector column[MOST], row[MOST], square[MOST][MOST];
    FOR_EACH_CHANNEL {
        const vector scale = ROW_OF(norm, SCALE), offset = ROW_OF(norm, OFFSET);
        for (int j = 0; j < seen; j++) {
            for (int i = 0; i < seen; i++) {
                const Py_ssize_t y = top + i - 1, x = left + j - 1;
                column[i] = (vector){0};
                if (INSIDE(y, x)) {
                    column[i] = LOAD(map + PLACE(y, x));
                    if (norm) {
                        column[i] = column[i] * scale + offset;
                        column[i] = RECTIFIED(column[i]);
                    }
                }
            }
            line(column, row);
            for (int i = 0; i < seen; i++)
                square[i][j] = row[i];
        }
        for (int i = 0; i < seen; i++) {
            line(square[i], row);
            for (int j = 0; j < seen; j++)
                STORE(tile + PLANE(i, j), row[j]);
        }
    }
}

LINE NAME(from_tile)(const float *tile, float *map, Py_ssize_t width, Py_ssize_t channels, Py_ssize_t top,
                     Py_ssize_t left, Py_ssize_t plane, int seen, NAME(line) line)
{
    vector column[MOST], row[MOST], square[OWN][MOST];
    FOR_EACH_CHANNEL {
        for (int j = 0; j < seen; j++) {
            for (int i = 0; i < seen; i++)
                column[i] = LOAD(tile + PLANE(i, j));
            line(column, row);
            for (int i = 0; i < OWN; i++)
                square[i][j] = row[i];
        }
        for (int i = 0; i < OWN; i++) {
            line(square[i], row);
            for (int j = 0; j < OWN; j++)
                STORE(map + PLACE(top + i, left + j), row[j]);
        }
    }
}

/* The transpose of to_tile: what tiles share adds up. */
LINE NAME(back_from_tile)(const float *tile, float *map, Py_ssize_t height, Py_ssize_t width, Py_ssize_t channels,
                          Py_ssize_t top, Py_ssize_t left, Py_ssize_t plane, int seen, NAME(line) line)
{
    vector column[MOST], row[MOST], square[MOST][MOST];
    FOR_EACH_CHANNEL {
        for (int j = 0; j < seen; j++) {
            for (int i = 0; i < seen; i++)
                column[i] = LOAD(tile + PLANE(i, j));
            line(column, row);
            for (int i = 0; i < seen; i++)
                square[i][j] = row[i];
        }
        for (int i = 0; i < seen; i++) {
            line(square[i], row);
            for (int j = 0; j < seen; j++) {
                const Py_ssize_t y = top + i - 1, x = left + j - 1;
                if (INSIDE(y, x))
                    STORE(map + PLACE(y, x), LOAD(map + PLACE(y, x)) + row[j]);
            }
        }
    }
}

/* The gradient of a result at a place: where a norm follows, of what it was given the norm of. */
#define FROM_NORM const vector scale = ROW_OF(norm, SCALE), mean = ROW_OF(norm, MEAN),                       \
                               first = ROW_OF(norm, FIRST), second = ROW_OF(norm, SECOND);
#define GRADIENT(at)                                                                                         \
    (norm ? (vector)(scale * (LOAD(gradient + (at)) - first - second * (LOAD(result + (at)) - mean)))            \
          : (vector)LOAD(gradient + (at)))

/* The transpose of from_tile. */
LINE NAME(back_to_tile)(const float *gradient, const float *result, const float *norm, float *tile, Py_ssize_t width,
                        Py_ssize_t channels, Py_ssize_t top, Py_ssize_t left, Py_ssize_t plane, int seen,
                        NAME(line) line)
{
    vector column[MOST], row[MOST], square[MOST][MOST];
    FOR_EACH_CHANNEL {
        FROM_NORM
        for (int j = 0; j < OWN; j++) {
            for (int i = 0; i < OWN; i++)
                column[i] = GRADIENT(PLACE(top + i, left + j));
            line(column, row);
            for (int i = 0; i < seen; i++)
                square[i][j] = row[i];
        }
        for (int i = 0; i < seen; i++) {
            line(square[i], row);
            for (int j = 0; j < seen; j++)
                STORE(tile + PLANE(i, j), row[j]);
        }
    }
}

/* The same for a shortcut, a 1x1 convolution beside one of stride 2. The places that it sees are the first four along a
   tile's lines, as they are, and so are its products. */

#define FOR_EACH_OWN for (int i = 0; i < OWN; i++) for (int j = 0; j < OWN; j++)

LINE NAME(from_plain)(const float *tile, float *map, Py_ssize_t width, Py_ssize_t channels, Py_ssize_t top,
                      Py_ssize_t left, Py_ssize_t plane)
{
    const int seen = OWN;
    FOR_EACH_OWN FOR_EACH_CHANNEL
        STORE(map + PLACE(top + i, left + j), LOAD(tile + PLANE(i, j)));
}

LINE NAME(back_to_plain)(const float *gradient, const float *result, const float *norm, float *tile,
                         Py_ssize_t width, Py_ssize_t channels, Py_ssize_t top, Py_ssize_t left, Py_ssize_t plane)
{
    const int seen = OWN;
    FOR_EACH_CHANNEL {
        FROM_NORM
        FOR_EACH_OWN
            STORE(tile + PLANE(i, j), GRADIENT(PLACE(top + i, left + j)));
    }
}

/* Products of a plane, ROWS by a pair of vectors at a time in registers: to (rows, columns) is, or grows by, from
   (rows, inner) by taps (pairs of columns, inner, a pair). Rows come in whole ROWS; those past the last tile hold
   whatever they held. */

enum { NAME(ROWS) = LANES == 16 ? 12 : 6, NAME(TAPS) = LANES == 16 ? 8 : 4, NAME(PAIR) = 2 * LANES };

TARGET static void NAME(multiply)(const float *restrict from, const float *restrict taps, float *restrict to,
                                  Py_ssize_t rows, Py_ssize_t inner, Py_ssize_t columns, int grows)
{
    for (Py_ssize_t column = 0; column < columns; column += NAME(PAIR))
        for (Py_ssize_t row = 0; row < rows; row += NAME(ROWS)) {
            vector sums[NAME(ROWS)][2] = {0};
            const float *tap = taps + column * inner;
            for (int r = 0; grows && r < NAME(ROWS); r++) {
                sums[r][0] = LOAD(to + (row + r) * columns + column);
                sums[r][1] = LOAD(to + (row + r) * columns + column + LANES);
            }
            for (Py_ssize_t k = 0; k < inner; k++, tap += NAME(PAIR)) {
                const vector low = LOAD(tap), high = LOAD(tap + LANES);
                for (int r = 0; r < NAME(ROWS); r++) {
                    const float factor = from[(row + r) * inner + k];
                    sums[r][0] += factor * low;
                    sums[r][1] += factor * high;
                }
            }
            for (int r = 0; r < NAME(ROWS); r++) {
                STORE(to + (row + r) * columns + column, sums[r][0]);
                STORE(to + (row + r) * columns + column + LANES, sums[r][1]);
            }
        }
}

/* The gradient of taps (outputs, inputs) is, or grows by, products (rows, outputs), transposed, by seen (rows,
   inputs). */
TARGET static void NAME(multiply_transposed)(const float *restrict products, const float *restrict seen,
                                             float *restrict taps, Py_ssize_t rows, Py_ssize_t outputs,
                                             Py_ssize_t inputs, int grows)
{
    for (Py_ssize_t output = 0; output < outputs; output += NAME(TAPS))
        for (Py_ssize_t input = 0; input < inputs; input += NAME(PAIR)) {
            vector sums[NAME(TAPS)][2] = {0};
            float *at = taps + output * inputs + input;
            for (int r = 0; grows && r < NAME(TAPS); r++) {
                sums[r][0] = LOAD(at + r * inputs);
                sums[r][1] = LOAD(at + r * inputs + LANES);
            }
            for (Py_ssize_t k = 0; k < rows; k++) {
                const vector low = LOAD(seen + k * inputs + input), high = LOAD(seen + k * inputs + input + LANES);
                for (int r = 0; r < NAME(TAPS); r++) {
                    const float factor = products[k * outputs + output + r];
                    sums[r][0] += factor * low;
                    sums[r][1] += factor * high;
                }
            }
            for (int r = 0; r < NAME(TAPS); r++) {
                STORE(at + r * inputs, sums[r][0]);
                STORE(at + r * inputs + LANES, sums[r][1]);
            }
        }
}

/* A slot's share: some maps at a time, some of their tiles at a time. Tiles are `step` places of a map apart. */

#define FOR_EACH_TILE                                                                                        \
    for (Py_ssize_t tile = 0, row, column, map; tile < count                                                 \
         && (map = first + (start + tile) / each, row = (start + tile) % each / across,                      \
             column = (start + tile) % across, 1); tile++)

#define SHARE                                                                                                \
    const struct tiles own = *(const struct tiles *)given, *const tiles = &own;                              \
    const Py_ssize_t height = tiles->height, width = tiles->width, across = width / step;                    \
    const Py_ssize_t each = height / step * across, together = tiles->together, block = tiles->block;        \
    const Py_ssize_t inputs = tiles->inputs, in_plane = block * inputs + tiles->gap;                         \
    const Py_ssize_t outputs = tiles->outputs, out_plane = block * outputs + tiles->gap;                     \
    const Py_ssize_t in_map = height * width * inputs, out_map = each * OWN * OWN * outputs;                 \
    const int planes = seen_places * seen_places;                                                            \
    float *const seen = tiles->room + slot * (planes * in_plane + (planes + OWN * OWN) * out_plane);         \
    float *const products = seen + planes * in_plane, *const plain = products + planes * out_plane;          \
    for (Py_ssize_t first = slot * together; first < tiles->count; first += tiles->slots * together)    \
        for (Py_ssize_t start = 0, count,                                                                    \
             all = each * (tiles->count - first < together ? tiles->count - first : together);     \
             start < all && (count = all - start < block ? all - start : block); start += block)

#define WHOLE(rows) (((rows) + NAME(ROWS) - 1) / NAME(ROWS) * NAME(ROWS))
#define IN_MAP(start) (start) + map * in_map
#define OUT_MAP(start) (start) + map * out_map
#define OF_MAPS height, width, inputs, row * step, column * step, in_plane, seen_places
#define OF_OUT across * OWN, outputs, row * OWN, column * OWN, out_plane
#define FOR_EACH_MAP for (Py_ssize_t map = first; map < first + all / each; map++)

LINE NAME(forth)(const void *given, Py_ssize_t slot, int seen_places, int step, NAME(line) maps, NAME(line) out)
{
    SHARE {
        FOR_EACH_TILE
            NAME(to_tile)(IN_MAP(tiles->maps), tiles->maps_norm, seen + tile * inputs, OF_MAPS, maps);
        for (int place = 0; place < planes; place++)
            NAME(multiply)(seen + place * in_plane, tiles->taps + place * inputs * outputs,
                           products + place * out_plane, WHOLE(count), inputs, outputs, 0);
        FOR_EACH_TILE
            NAME(from_tile)(products + tile * outputs, OUT_MAP(tiles->result), OF_OUT, seen_places, out);
        if (tiles->shortcut) {
            FOR_EACH_OWN
                NAME(multiply)(seen + (i * seen_places + j) * in_plane, tiles->shortcut_taps,
                               plain + (i * OWN + j) * out_plane, WHOLE(count), inputs, outputs, 0);
            FOR_EACH_TILE
                NAME(from_plain)(plain + tile * outputs, OUT_MAP(tiles->shortcut), OF_OUT);
        }
        if (tiles->sums && start + count == all) {
            struct norm norm = {.x = tiles->result, .sums = tiles->sums, .columns = outputs};
            norm.rows_each = each * OWN * OWN, norm.rows = tiles->count * norm.rows_each;
            FOR_EACH_MAP
                NAME(moments)(&norm, map);
            norm.x = tiles->shortcut, norm.sums = tiles->shortcut_sums;
            if (tiles->shortcut)
                FOR_EACH_MAP
                    NAME(moments)(&norm, map);
        }
    }
}

LINE NAME(back)(const void *given, Py_ssize_t slot, int seen_places, int step, NAME(line) maps,
                NAME(line) maps_transposed, NAME(line) out_transposed)
{
    SHARE {
        float *const of_taps = tiles->of_taps + slot * planes * inputs * outputs;
        float *const of_shortcut_taps = tiles->of_shortcut_taps + slot * inputs * outputs;
        const int grows = start || first >= tiles->slots * together;
        FOR_EACH_TILE
            NAME(back_to_tile)(OUT_MAP(tiles->gradient), OUT_MAP(tiles->result), tiles->result_norm,
                               products + tile * outputs, OF_OUT, seen_places, out_transposed);
        if (tiles->shortcut)
            FOR_EACH_TILE
                NAME(back_to_plain)(OUT_MAP(tiles->shortcut_gradient), OUT_MAP(tiles->shortcut), tiles->shortcut_norm,
                                    plain + tile * outputs, OF_OUT);
        if (tiles->of_taps) {
            FOR_EACH_TILE
                NAME(to_tile)(IN_MAP(tiles->maps), tiles->maps_norm, seen + tile * inputs, OF_MAPS, maps);
            for (int place = 0; place < planes; place++)
                NAME(multiply_transposed)(products + place * out_plane, seen + place * in_plane,
                                          of_taps + place * inputs * outputs, count, outputs, inputs, grows);
            if (tiles->shortcut)
                FOR_EACH_OWN
                    NAME(multiply_transposed)(plain + (i * OWN + j) * out_plane,
                                              seen + (i * seen_places + j) * in_plane, of_shortcut_taps, count,
                                              outputs, inputs, grows || i || j);
        }
        if (tiles->of_maps) {
            if (!start && !tiles->adds)
                memset(tiles->of_maps + first * in_map, 0, all / each * in_map * sizeof(float));
            for (int place = 0; place < planes; place++)
                NAME(multiply)(products + place * out_plane, tiles->taps + place * inputs * outputs,
                               seen + place * in_plane, WHOLE(count), outputs, inputs, 0);
            if (tiles->shortcut)
                FOR_EACH_OWN
                    NAME(multiply)(plain + (i * OWN + j) * out_plane, tiles->shortcut_taps,
                                   seen + (i * seen_places + j) * in_plane, WHOLE(count), outputs, inputs, 1);
            FOR_EACH_TILE
                NAME(back_from_tile)(seen + tile * inputs, IN_MAP(tiles->of_maps), OF_MAPS, maps_transposed);
            if (tiles->sums && start + count == all) {
                struct norm norm = {.x = tiles->maps, .gradient = tiles->of_maps, .of_plus = tiles->of_maps,
                                    .norm = (float *)tiles->maps_norm, .sums = tiles->sums, .columns = inputs};
                norm.rows_each = height * width, norm.rows = tiles->count * norm.rows_each;
                FOR_EACH_MAP
                    NAME(sums_of_gradient)(&norm, map);
            }
        }
    }
}

TARGET static void NAME(convolve)(const void *given, Py_ssize_t slot)
{
    if (((const struct tiles *)given)->stride == 1)
        NAME(forth)(given, slot, 6, OWN, NAME(line_maps), NAME(line_out));
    else
        NAME(forth)(given, slot, 9, 2 * OWN, NAME(line_strided_maps), NAME(line_strided_out));
}

TARGET static void NAME(convolve_back)(const void *given, Py_ssize_t slot)
{
    if (((const struct tiles *)given)->stride == 1)
        NAME(back)(given, slot, 6, OWN, NAME(line_maps), NAME(line_maps_transposed), NAME(line_out_transposed));
    else
        NAME(back)(given, slot, 9, 2 * OWN, NAME(line_strided_maps), NAME(line_strided_maps_transposed),
                   NAME(line_strided_out_transposed));
}

/* The transforms for vectors of LANES floats; included once for each instruction set. */

#define vector NAME(vector)
typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

#define LOAD(place) (*(const vector *)(place))
#define STORE(place, value) (*(vector *)(place) = (value))
#define LINE TARGET static inline __attribute__((always_inline)) void

/* Along one line, with the points 0, +-2/3, +-3/2 and infinity: the matrices of small_maps.PRODUCTS for a tile. */

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

/* A tile of a map: down its columns, then along its rows, LANES of its channels at a time. `top` and `left` are the
   first place of the tile's own; it sees one more on each side. */

#define FOR_EACH_CHANNEL for (Py_ssize_t channel = 0; channel < channels; channel += LANES)
#define PLACE(y, x) (((y) * width + (x)) * channels + channel)
#define PLANE(i, j) (((i) * SEEN + (j)) * plane + channel)
#define INSIDE(y, x) ((size_t)(y) < (size_t)height && (size_t)(x) < (size_t)width)

LINE NAME(to_tile)(const float *map, float *tile, Py_ssize_t height, Py_ssize_t width, Py_ssize_t channels,
                   Py_ssize_t top, Py_ssize_t left, Py_ssize_t plane)
{
    static const float nothing[LANES];
    vector column[SEEN], row[SEEN], square[SEEN][SEEN];
    FOR_EACH_CHANNEL {
        for (int j = 0; j < SEEN; j++) {
            for (int i = 0; i < SEEN; i++) {
                const Py_ssize_t y = top + i - 1, x = left + j - 1;
                column[i] = LOAD(INSIDE(y, x) ? map + PLACE(y, x) : nothing);
            }
            NAME(line_maps)(column, row);
            for (int i = 0; i < SEEN; i++)
                square[i][j] = row[i];
        }
        for (int i = 0; i < SEEN; i++) {
            NAME(line_maps)(square[i], row);
            for (int j = 0; j < SEEN; j++)
                STORE(tile + PLANE(i, j), row[j]);
        }
    }
}

LINE NAME(from_tile)(const float *tile, float *map, Py_ssize_t width, Py_ssize_t channels, Py_ssize_t top,
                     Py_ssize_t left, Py_ssize_t plane)
{
    vector column[SEEN], row[SEEN], square[OWN][SEEN];
    FOR_EACH_CHANNEL {
        for (int j = 0; j < SEEN; j++) {
            for (int i = 0; i < SEEN; i++)
                column[i] = LOAD(tile + PLANE(i, j));
            NAME(line_out)(column, row);
            for (int i = 0; i < OWN; i++)
                square[i][j] = row[i];
        }
        for (int i = 0; i < OWN; i++) {
            NAME(line_out)(square[i], row);
            for (int j = 0; j < OWN; j++)
                STORE(map + PLACE(top + i, left + j), row[j]);
        }
    }
}

/* The transpose of to_tile: what tiles share adds up. */
LINE NAME(back_from_tile)(const float *tile, float *map, Py_ssize_t height, Py_ssize_t width, Py_ssize_t channels,
                          Py_ssize_t top, Py_ssize_t left, Py_ssize_t plane)
{
    vector column[SEEN], row[SEEN], square[SEEN][SEEN];
    FOR_EACH_CHANNEL {
        for (int j = 0; j < SEEN; j++) {
            for (int i = 0; i < SEEN; i++)
                column[i] = LOAD(tile + PLANE(i, j));
            NAME(line_maps_transposed)(column, row);
            for (int i = 0; i < SEEN; i++)
                square[i][j] = row[i];
        }
        for (int i = 0; i < SEEN; i++) {
            NAME(line_maps_transposed)(square[i], row);
            for (int j = 0; j < SEEN; j++) {
                const Py_ssize_t y = top + i - 1, x = left + j - 1;
                if (INSIDE(y, x))
                    STORE(map + PLACE(y, x), LOAD(map + PLACE(y, x)) + row[j]);
            }
        }
    }
}

/* The transpose of from_tile. */
LINE NAME(back_to_tile)(const float *map, float *tile, Py_ssize_t width, Py_ssize_t channels, Py_ssize_t top,
                        Py_ssize_t left, Py_ssize_t plane)
{
    vector column[SEEN], row[SEEN], square[SEEN][SEEN];
    FOR_EACH_CHANNEL {
        for (int j = 0; j < OWN; j++) {
            for (int i = 0; i < OWN; i++)
                column[i] = LOAD(map + PLACE(top + i, left + j));
            NAME(line_out_transposed)(column, row);
            for (int i = 0; i < SEEN; i++)
                square[i][j] = row[i];
        }
        for (int i = 0; i < SEEN; i++) {
            NAME(line_out_transposed)(square[i], row);
            for (int j = 0; j < SEEN; j++)
                STORE(tile + PLANE(i, j), row[j]);
        }
    }
}

/* Products of a plane, ROWS by a pair of vectors at a time in registers: to (rows, columns) = from (rows, inner) by
   taps (pairs of columns, inner, a pair). Rows come in whole ROWS; those past the last tile hold whatever they held. */

enum { NAME(ROWS) = LANES == 16 ? 12 : 6, NAME(TAPS) = LANES == 16 ? 8 : 4, NAME(PAIR) = 2 * LANES };

TARGET static void NAME(multiply)(const float *restrict from, const float *restrict taps, float *restrict to,
                                  Py_ssize_t rows, Py_ssize_t inner, Py_ssize_t columns)
{
    for (Py_ssize_t column = 0; column < columns; column += NAME(PAIR))
        for (Py_ssize_t row = 0; row < rows; row += NAME(ROWS)) {
            vector sums[NAME(ROWS)][2] = {0};
            const float *tap = taps + column * inner;
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

/* A slot's share: some maps at a time, some of their tiles at a time. */

#define FOR_EACH_TILE                                                                                        \
    for (Py_ssize_t tile = 0, top, left, map; tile < count                                                   \
         && (map = first + (start + tile) / each, top = (start + tile) % each / across * OWN,                \
             left = (start + tile) % across * OWN, 1); tile++)

#define SHARE                                                                                                \
    const struct tiles own = *(const struct tiles *)given, *const tiles = &own;                              \
    const Py_ssize_t height = tiles->height, width = tiles->width, across = width / OWN;                     \
    const Py_ssize_t each = height / OWN * across, together = tiles->together, block = tiles->block;         \
    const Py_ssize_t inputs = tiles->inputs, in_plane = block * inputs + tiles->gap;                         \
    const Py_ssize_t outputs = tiles->outputs, out_plane = block * outputs + tiles->gap;                     \
    const Py_ssize_t in_map = height * width * inputs, out_map = height * width * outputs;                   \
    float *const seen = tiles->room + slot * PLANES * (in_plane + out_plane);                                \
    float *const products = seen + PLANES * in_plane;                                                        \
    for (Py_ssize_t first = slot * together; first < tiles->maps; first += tiles->slots * together)          \
        for (Py_ssize_t start = 0, count,                                                                    \
             all = each * (tiles->maps - first < together ? tiles->maps - first : together);                 \
             start < all && (count = all - start < block ? all - start : block); start += block)

#define WHOLE(rows) (((rows) + NAME(ROWS) - 1) / NAME(ROWS) * NAME(ROWS))

TARGET static void NAME(convolve)(const void *given, Py_ssize_t slot)
{
    SHARE {
        FOR_EACH_TILE
            NAME(to_tile)(tiles->from + map * in_map, seen + tile * inputs, height, width, inputs, top, left, in_plane);
        for (int place = 0; place < PLANES; place++)
            NAME(multiply)(seen + place * in_plane, tiles->taps + place * inputs * outputs,
                           products + place * out_plane, WHOLE(count), inputs, outputs);
        FOR_EACH_TILE
            NAME(from_tile)(products + tile * outputs, tiles->to + map * out_map, width, outputs, top, left, out_plane);
    }
}

TARGET static void NAME(convolve_back)(const void *given, Py_ssize_t slot)
{
    SHARE {
        float *const of_taps = tiles->of_taps + slot * PLANES * inputs * outputs;
        FOR_EACH_TILE
            NAME(back_to_tile)(tiles->gradient + map * out_map, products + tile * outputs, width, outputs, top, left,
                               out_plane);
        if (tiles->of_taps) {
            FOR_EACH_TILE
                NAME(to_tile)(tiles->from + map * in_map, seen + tile * inputs, height, width, inputs, top, left,
                              in_plane);
            for (int place = 0; place < PLANES; place++)
                NAME(multiply_transposed)(products + place * out_plane, seen + place * in_plane,
                                          of_taps + place * inputs * outputs, count, outputs, inputs,
                                          start || first >= tiles->slots * together);
        }
        if (tiles->to) {
            if (!start)
                memset(tiles->to + first * in_map, 0, all / each * in_map * sizeof(float));
            for (int place = 0; place < PLANES; place++)
                NAME(multiply)(products + place * out_plane, tiles->taps + place * inputs * outputs,
                               seen + place * in_plane, WHOLE(count), outputs, inputs);
            FOR_EACH_TILE
                NAME(back_from_tile)(seen + tile * inputs, tiles->to + map * in_map, height, width, inputs, top, left,
                                     in_plane);
        }
    }
}

#undef vector
#undef LOAD
#undef STORE
#undef LINE
#undef FOR_EACH_CHANNEL
#undef PLACE
#undef PLANE
#undef INSIDE
#undef FOR_EACH_TILE
#undef SHARE
#undef WHOLE

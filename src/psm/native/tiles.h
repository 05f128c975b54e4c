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

/* Over a map: for each tile and each LANES of its channels, down its columns and along its rows. `top` and `left` are
   the tile's first own place. */

#define FOR_EACH_TILE                                                                                       \
    const Py_ssize_t height = tiles->height, width = tiles->width, channels = tiles->channels;                 \
    const Py_ssize_t across = width / OWN, each = height / OWN * across, plane = tiles->plane;              \
    vector column[SEEN], row[SEEN], square[SEEN][SEEN];                                                     \
    for (Py_ssize_t index = 0; index < each;  index++)                                                      \
        for (Py_ssize_t channel = 0, top = index / across * OWN, left = index % across * OWN;               \
             channel < channels; channel += LANES)

#define MAP(start) ((start) + number * height * width * channels + channel)
#define TILE(start) ((start) + (number * each + index) * channels + channel)
#define PLACE(y, x) (((y) * width + (x)) * channels)
#define INSIDE(place, side) ((size_t)(place) < (size_t)(side))

TARGET static void NAME(maps_of_map)(const void *given, Py_ssize_t number)
{
    const struct tiles *tiles = given;
    static const float nothing[LANES];
    FOR_EACH_TILE {
        const float *map = MAP(tiles->from);
        float *tile = TILE(tiles->to);
        for (int j = 0; j < SEEN; j++) {
            const Py_ssize_t x = left + j - 1;
            for (int i = 0; i < SEEN; i++) {
                const Py_ssize_t y = top + i - 1;
                column[i] = LOAD(INSIDE(x, width) && INSIDE(y, height) ? map + PLACE(y, x) : nothing);
            }
            NAME(line_maps)(column, row);
            for (int i = 0; i < SEEN; i++)
                square[i][j] = row[i];
        }
        for (int i = 0; i < SEEN; i++) {
            NAME(line_maps)(square[i], row);
            for (int j = 0; j < SEEN; j++)
                STORE(tile + (i * SEEN + j) * plane, row[j]);
        }
    }
}

TARGET static void NAME(out_of_map)(const void *given, Py_ssize_t number)
{
    const struct tiles *tiles = given;
    FOR_EACH_TILE {
        const float *tile = TILE(tiles->from);
        float *map = MAP(tiles->to);
        for (int j = 0; j < SEEN; j++) {
            for (int i = 0; i < SEEN; i++)
                column[i] = LOAD(tile + (i * SEEN + j) * plane);
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

TARGET static void NAME(maps_transposed_of_map)(const void *given, Py_ssize_t number)
{
    const struct tiles *tiles = given;
    const Py_ssize_t size = tiles->height * tiles->width * tiles->channels;
    memset(tiles->to + number * size, 0, size * sizeof(float));
    FOR_EACH_TILE {
        const float *tile = TILE(tiles->from);
        float *map = MAP(tiles->to);
        for (int j = 0; j < SEEN; j++) {
            for (int i = 0; i < SEEN; i++)
                column[i] = LOAD(tile + (i * SEEN + j) * plane);
            NAME(line_maps_transposed)(column, row);
            for (int i = 0; i < SEEN; i++)
                square[i][j] = row[i];
        }
        for (int i = 0; i < SEEN; i++) {
            const Py_ssize_t y = top + i - 1;
            NAME(line_maps_transposed)(square[i], row);
            for (int j = 0; j < SEEN; j++) {
                const Py_ssize_t x = left + j - 1;
                if (INSIDE(x, width) && INSIDE(y, height))
                    STORE(map + PLACE(y, x), LOAD(map + PLACE(y, x)) + row[j]);
            }
        }
    }
}

TARGET static void NAME(out_transposed_of_map)(const void *given, Py_ssize_t number)
{
    const struct tiles *tiles = given;
    FOR_EACH_TILE {
        const float *map = MAP(tiles->from);
        float *tile = TILE(tiles->to);
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
                STORE(tile + (i * SEEN + j) * plane, row[j]);
        }
    }
}

#undef vector
#undef LOAD
#undef STORE
#undef LINE
#undef FOR_EACH_TILE
#undef MAP
#undef TILE
#undef PLACE
#undef INSIDE

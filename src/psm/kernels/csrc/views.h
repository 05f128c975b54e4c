/* Views: crop, resize, flip and colors in one pass, a row of a view at a time. */

/* The pixels that one place of a view sees along a line, as augment.resampling has it: how many, the first, weights. */
TARGET static Py_ssize_t NAME(sight)(float start, float extent, Py_ssize_t place, int mirrored, Py_ssize_t size,
                                     Py_ssize_t *first, float *weights)
{
    const float along = (place + 0.5f) / size, center = start + extent * (mirrored ? 1 - along : along);
    const float reach = extent > size ? extent / size : 1;
    const Py_ssize_t least = (Py_ssize_t)start, most = least + (Py_ssize_t)extent - 1;
    const Py_ssize_t low = (Py_ssize_t)floorf(center - reach - 0.5f) + 1;
    const Py_ssize_t high = (Py_ssize_t)ceilf(center + reach - 0.5f) - 1;
    const Py_ssize_t from = low > least ? low : least, to = high < most ? high : most;
    float sum = 0;
    for (Py_ssize_t pixel = from; pixel <= to; pixel++) {
        const float weight = 1 - fabsf(pixel + 0.5f - center) / reach;
        sum += weights[pixel - from] = weight > 0 ? weight : 0;
    }
    for (Py_ssize_t pixel = from; pixel <= to; pixel++)
        weights[pixel - from] /= sum;
    *first = from - least;
    return to - from + 1;
}

/* Steps on the way from rows of an image to one of a view, apart so that they become vectors. */

LINE NAME(resize)(const float *restrict from, const Py_ssize_t *restrict first, const float *restrict weights,
                  Py_ssize_t most, Py_ssize_t taps, Py_ssize_t size, float *restrict to)
{
    for (Py_ssize_t x = 0; x < size; x++) {
        float sum = 0;
        for (Py_ssize_t k = 0; k < taps; k++)
            sum += weights[x * most + k] * from[first[x] + k];
        to[x] = sum;
    }
}

LINE NAME(color)(const float *restrict shade, const float *restrict by, float offset, float mean, float deviation,
                  Py_ssize_t size, float *restrict to)
{
    for (Py_ssize_t x = 0; x < size; x++) {
        float value = by[0] * shade[x] + by[1] * shade[size + x] + by[2] * shade[2 * size + x] + offset;
        value = value < 0 ? 0 : value;
        value = value > 1 ? 1 : value;
        to[x] = (value - mean) / deviation;
    }
}

LINE NAME(blend)(const unsigned char *restrict line, float weight, int grows, Py_ssize_t count, float *restrict to)
{
    for (Py_ssize_t x = 0; x < count; x++)
        to[x] = (grows ? to[x] : 0) + weight * line[x];
}

TARGET static void NAME(views)(const void *given, Py_ssize_t part)
{
    const struct views own = *(const struct views *)given, *const views = &own;
    const Py_ssize_t width = views->width, plane = views->height * width, size = views->size, most = views->most;
    const float *const box = views->boxes + 4 * part, *const matrix = views->matrix + 9 * part;
    const float *const luma = views->shades, *const mean = views->shades + 3, *const deviation = views->shades + 6;
    float *const view = views->views + part * 3 * size * size;
    if (!(box[0] >= 0 && box[1] >= 0 && box[2] >= 1 && box[3] >= 1 && box[0] + box[2] <= views->height &&
          box[1] + box[3] <= width)) { /* not a box of the image */
        for (Py_ssize_t place = 0; place < 3 * size * size; place++)
            view[place] = NAN;
        return;
    }
    const Py_ssize_t down = (Py_ssize_t)box[2], across = (Py_ssize_t)box[3];
    const unsigned char *const corner =
        views->images + part % views->count * 3 * plane + (Py_ssize_t)box[0] * width + (Py_ssize_t)box[1];
    Py_ssize_t first[size], taps = 1, row_first;
    float weights[size * most], row_weights[most], seen[across + most], shade[3 * size], colored[3 * size];
    float offset = 0;

    memset(weights, 0, sizeof weights);
    memset(seen + across, 0, most * sizeof(float));
    for (Py_ssize_t x = 0; x < size; x++) {
        const Py_ssize_t own_taps =
            NAME(sight)(box[1], box[3], x, views->flip[part] > 0, size, first + x, weights + x * most);
        taps = own_taps > taps ? own_taps : taps;
    }
    if (views->pivot[part]) { /* times the mean luma: each pixel counts as often as places see it */
        float by_row[down], by_column[across];
        memset(by_row, 0, sizeof by_row);
        memset(by_column, 0, sizeof by_column);
        for (Py_ssize_t y = 0; y < size; y++) {
            const Py_ssize_t rows = NAME(sight)(box[0], box[2], y, 0, size, &row_first, row_weights);
            for (Py_ssize_t k = 0; k < rows; k++)
                by_row[row_first + k] += row_weights[k];
            for (Py_ssize_t k = 0; k < taps && first[y] + k < across; k++)
                by_column[first[y] + k] += weights[y * most + k];
        }
        double total = 0;
        for (int channel = 0; channel < 3; channel++)
            for (Py_ssize_t y = 0; y < down; y++) {
                const unsigned char *const line = corner + channel * plane + y * width;
                NAME(blend)(line, luma[channel] * by_row[y], channel || y, across, seen);
            }
        for (Py_ssize_t x = 0; x < across; x++)
            total += (double)by_column[x] * seen[x];
        offset = views->pivot[part] * (float)(total / (255.0 * size * size));
    }
    for (Py_ssize_t y = 0; y < size; y++) {
        const Py_ssize_t rows = NAME(sight)(box[0], box[2], y, 0, size, &row_first, row_weights);
        for (int channel = 0; channel < 3; channel++) {
            const unsigned char *const line = corner + channel * plane + row_first * width;
            for (Py_ssize_t k = 0; k < rows; k++)
                NAME(blend)(line + k * width, row_weights[k] / 255, k > 0, across, seen);
            if (taps <= 2)
                NAME(resize)(seen, first, weights, most, 2, size, shade + channel * size);
            else
                NAME(resize)(seen, first, weights, most, taps, size, shade + channel * size);
        }
        float *const to = view + y * size * views->pixel;
        for (int channel = 0; channel < 3; channel++)
            NAME(color)(shade, matrix + 3 * channel, offset, mean[channel], deviation[channel], size,
                         views->pixel == 1 ? to + channel * views->channel : colored + channel * size);
        if (views->pixel != 1)
            for (Py_ssize_t x = 0; x < size; x++)
                for (int channel = 0; channel < 3; channel++)
                    to[3 * x + channel] = colored[channel * size + x];
    }
}

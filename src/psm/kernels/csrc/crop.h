/* Crop, resize, flip, color and normalization of views in one pass, a row of a view at a time. */

/* Bilinear weights of one output pixel along one axis, with antialiasing (psm.ops.resize_matrix): writes the first
   source pixel and the weights, returns how many there are. */
TARGET static Py_ssize_t NAME(resample_weights)(float start, float extent, Py_ssize_t index, int flip, Py_ssize_t size,
                                                Py_ssize_t *first, float *weights)
{
    const float along = (index + 0.5f) / size, center = start + extent * (flip ? 1 - along : along);
    const float support = extent > size ? extent / size : 1;
    const Py_ssize_t least = (Py_ssize_t)start, last = least + (Py_ssize_t)extent - 1;
    const Py_ssize_t low = (Py_ssize_t)floorf(center - support - 0.5f) + 1;
    const Py_ssize_t high = (Py_ssize_t)ceilf(center + support - 0.5f) - 1;
    const Py_ssize_t from = low > least ? low : least, to = high < last ? high : last;
    float sum = 0;
    for (Py_ssize_t pixel = from; pixel <= to; pixel++) {
        const float weight = 1 - fabsf(pixel + 0.5f - center) / support;
        sum += weights[pixel - from] = weight > 0 ? weight : 0;
    }
    for (Py_ssize_t pixel = from; pixel <= to; pixel++)
        weights[pixel - from] /= sum;
    *first = from - least;
    return to - from + 1;
}

/* The loops from rows of an image to a row of a view, functions of their own so that the compiler vectorizes them. */

INLINE NAME(resample_row)(const float *restrict from, const Py_ssize_t *restrict first, const float *restrict weights,
                          Py_ssize_t max_taps, Py_ssize_t taps, Py_ssize_t size, float *restrict to)
{
    for (Py_ssize_t x = 0; x < size; x++) {
        float sum = 0;
        for (Py_ssize_t k = 0; k < taps; k++)
            sum += weights[x * max_taps + k] * from[first[x] + k];
        to[x] = sum;
    }
}

INLINE NAME(color_row)(const float *restrict resampled, const float *restrict by, float offset, float mean, float std,
                       Py_ssize_t size, float *restrict to)
{
    for (Py_ssize_t x = 0; x < size; x++) {
        float value = by[0] * resampled[x] + by[1] * resampled[size + x] + by[2] * resampled[2 * size + x] + offset;
        value = value < 0 ? 0 : value;
        value = value > 1 ? 1 : value;
        to[x] = (value - mean) / std;
    }
}

INLINE NAME(add_row)(const unsigned char *restrict line, float weight, int accumulate, Py_ssize_t count,
                     float *restrict to)
{
    for (Py_ssize_t x = 0; x < count; x++)
        to[x] = (accumulate ? to[x] : 0) + weight * line[x];
}

TARGET static void NAME(crop_color)(const void *given, Py_ssize_t part)
{
    const struct crop copy = *(const struct crop *)given, *const args = &copy;
    const Py_ssize_t width = args->width, plane = args->height * width, size = args->size, max_taps = args->max_taps;
    const float *const box = args->boxes + 4 * part, *const matrix = args->color + 9 * part;
    const float *const luma = args->constants, *const mean = args->constants + 3, *const std = args->constants + 6;
    float *const view = args->views + part * 3 * size * size;
    if (!(box[0] >= 0 && box[1] >= 0 && box[2] >= 1 && box[3] >= 1 && box[0] + box[2] <= args->height &&
          box[1] + box[3] <= width)) { /* outside the image */
        for (Py_ssize_t index = 0; index < 3 * size * size; index++)
            view[index] = NAN;
        return;
    }
    const Py_ssize_t down = (Py_ssize_t)box[2], across = (Py_ssize_t)box[3];
    const unsigned char *const corner =
        args->images + part % args->num_images * 3 * plane + (Py_ssize_t)box[0] * width + (Py_ssize_t)box[1];
    Py_ssize_t first[size], taps = 1, row_first;
    float weights[size * max_taps], row_weights[max_taps], source_row[across + max_taps];
    float resampled[3 * size], colored[3 * size];
    float offset = 0;

    memset(weights, 0, sizeof weights);
    memset(source_row + across, 0, max_taps * sizeof(float));
    for (Py_ssize_t x = 0; x < size; x++) {
        const Py_ssize_t num_taps =
            NAME(resample_weights)(box[1], box[3], x, args->flip[part] > 0, size, first + x, weights + x * max_taps);
        taps = num_taps > taps ? num_taps : taps;
    }
    if (args->pivot[part]) { /* times the mean luma of the resized crop, as a weighted mean of the source pixels */
        float by_row[down], by_column[across];
        memset(by_row, 0, sizeof by_row);
        memset(by_column, 0, sizeof by_column);
        for (Py_ssize_t y = 0; y < size; y++) {
            const Py_ssize_t rows = NAME(resample_weights)(box[0], box[2], y, 0, size, &row_first, row_weights);
            for (Py_ssize_t k = 0; k < rows; k++)
                by_row[row_first + k] += row_weights[k];
            for (Py_ssize_t k = 0; k < taps && first[y] + k < across; k++)
                by_column[first[y] + k] += weights[y * max_taps + k];
        }
        double total = 0;
        for (int channel = 0; channel < 3; channel++)
            for (Py_ssize_t y = 0; y < down; y++) {
                const unsigned char *const line = corner + channel * plane + y * width;
                NAME(add_row)(line, luma[channel] * by_row[y], channel || y, across, source_row);
            }
        for (Py_ssize_t x = 0; x < across; x++)
            total += (double)by_column[x] * source_row[x];
        offset = args->pivot[part] * (float)(total / (255.0 * size * size));
    }
    for (Py_ssize_t y = 0; y < size; y++) {
        const Py_ssize_t rows = NAME(resample_weights)(box[0], box[2], y, 0, size, &row_first, row_weights);
        for (int channel = 0; channel < 3; channel++) {
            const unsigned char *const line = corner + channel * plane + row_first * width;
            for (Py_ssize_t k = 0; k < rows; k++)
                NAME(add_row)(line + k * width, row_weights[k] / 255, k > 0, across, source_row);
            if (taps <= 2)
                NAME(resample_row)(source_row, first, weights, max_taps, 2, size, resampled + channel * size);
            else
                NAME(resample_row)(source_row, first, weights, max_taps, taps, size, resampled + channel * size);
        }
        float *const to = view + y * size * args->pixel_stride;
        for (int channel = 0; channel < 3; channel++)
            NAME(color_row)(resampled, matrix + 3 * channel, offset, mean[channel], std[channel], size,
                            args->pixel_stride == 1 ? to + channel * args->channel_stride : colored + channel * size);
        if (args->pixel_stride != 1)
            for (Py_ssize_t x = 0; x < size; x++)
                for (int channel = 0; channel < 3; channel++)
                    to[3 * x + channel] = colored[channel * size + x];
    }
}

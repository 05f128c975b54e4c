/* Words that the others share. They are included once for each instruction set, with LANES floats in a vector;
these say what LANES, NAME and TARGET say by then. */

#define vector NAME(vector)
#define bits NAME(bits)
#define VECTORS                                                                                            \
    typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));       \
    typedef int bits __attribute__((vector_size(LANES * sizeof(int)), aligned(4), may_alias));

#define LOAD(place) (*(const vector *)(place))
#define STORE(place, value) (*(vector *)(place) = (value))
#define VECTOR(value) ((vector){0} + (value))
#define WHERE(condition, value) ((vector)((condition) & (bits)(value))) /* zero elsewhere */
#define RECTIFIED(value) WHERE(~((value) < 0), value)                   /* what is no number stays so */

/* A batch norm's numbers, a row of channels each. */
enum { WEIGHT, BIAS, MEAN, VARIANCE, INVERSE, SCALE, OFFSET, FIRST, SECOND, OF_WEIGHT, OF_BIAS };
#define OF(norm, row, columns) ((norm) + (row) * (columns))

/* Types and macros of all kernels, which are compiled once for each instruction set: SIMD_WIDTH is the number of floats
in a vector, NAME(name) has the width as a suffix and TARGET is the function attribute of the instruction set. */

#define vector NAME(vector)
#define bits NAME(bits)
#define SIMD_TYPES                                                                                           \
    typedef float vector __attribute__((vector_size(SIMD_WIDTH * sizeof(float)), aligned(4), may_alias));    \
    typedef int bits __attribute__((vector_size(SIMD_WIDTH * sizeof(int)), aligned(4), may_alias));

#define INLINE TARGET static inline __attribute__((always_inline)) void

#define LOAD(address) (*(const vector *)(address))
#define STORE(address, value) (*(vector *)(address) = (value))
#define SPLAT(value) ((vector){0} + (value))
#define WHERE(condition, value) ((vector)((condition) & (bits)(value))) /* zero elsewhere */
#define RELU(value) WHERE(~((value) < 0), value)                        /* NaN stays NaN */

/* Rows of a batch norm's state, one value per channel each; GRAD_MEAN and GRAD_SLOPE are what grad_input needs. */
enum { WEIGHT, BIAS, MEAN, VARIANCE, INV_STD, SCALE, SHIFT, GRAD_MEAN, GRAD_SLOPE, GRAD_WEIGHT, GRAD_BIAS };
#define BN_ROW(bn, row, channels) ((bn) + (row) * (channels))

/* One AdamW step over a list of tensors: each buffer is read once and written once, in float32
 * arithmetic, and rounded once when it is stored.
 *
 * native.py compiles this file for one combination of dtypes (the macros PARAM to COMPENSATION, each
 * a FLOAT32, BFLOAT16 or FLOAT16; COMPENSATION may also be NONE or WORD, the packed form) and of
 * the switches STOCHASTIC_VARIANCE, STOCHASTIC_REMAINDER and DECAY_OUTSIDE (0 or 1), so that the
 * loop over elements has no branch and vectorises. aten.py is the same in torch's operations.
 */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define NONE 0
#define FLOAT32 1
#define BFLOAT16 2
#define FLOAT16 3
#define WORD 4

#define INLINE static inline __attribute__((always_inline))

/* What differs between the tensors of a call (kernel.py's TABLE_ROW), and the rates that do not. */
typedef struct {
    void *param, *grad, *exp_avg, *exp_avg_sq, *compensation;
    const uint16_t *random;
    uint64_t random_start, random_stride;
    int64_t numel;
    float step_size, variance_scale, decay_rate;
    uint32_t half, first_program;
} Tensor;

typedef struct {
    float one_minus_beta1, one_minus_beta2, eps, grad_multiplier;
} Rates;

INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
INLINE int is_nan(uint32_t u) { return (u & 0x7FFFFFFFu) > 0x7F800000u; }

/* Where the random bits of element i are, and of those after it in its block: kernel.py's
 * RandomBits says how. The variance's are half a block from those of the remainder. */
#define BLOCK_BITS 16

INLINE const uint16_t *random_bits(const Tensor *t, int64_t i, uint32_t distance) {
    const uint64_t block = (uint64_t)i >> BLOCK_BITS;
    const uint32_t place = (t->random_start + t->random_stride * block) >> 48 & ~7u;
    return t->random + (place ^ distance) + (i & ((1 << BLOCK_BITS) - 1));
}

INLINE const uint16_t *remainder_bits(const Tensor *t, int64_t i) { return random_bits(t, i, 0); }
INLINE const uint16_t *variance_bits(const Tensor *t, int64_t i) {
    return random_bits(t, i, 1 << (BLOCK_BITS - 1));
}

/* An element in a register is an image: the bits of a float32 of its value. The image of a bfloat16
 * or a word has the 16 bits themselves on top; what is below them is cut off when it is stored. */
INLINE uint32_t image_1(float x) { return bits_of(x); }
INLINE uint32_t image_2(uint16_t x) { return (uint32_t)x << 16; }
INLINE uint32_t image_3(_Float16 x) { return bits_of((float)x); }
INLINE uint32_t image_4(uint16_t x) { return (uint32_t)x << 16; }
INLINE float stored_1(uint32_t image) { return float_of(image); }
INLINE uint16_t stored_2(uint32_t image) { return image >> 16; }
INLINE _Float16 stored_3(uint32_t image) { return (_Float16)float_of(image); }
INLINE uint16_t stored_4(uint32_t image) { return image >> 16; }
INLINE float value_1(uint32_t image) { return float_of(image); }
INLINE float value_2(uint32_t image) { return float_of(image & 0xFFFF0000u); }
INLINE float value_3(uint32_t image) { return float_of(image); }
typedef float type_1;
typedef uint16_t type_2;
typedef _Float16 type_3;
typedef uint16_t type_4;
#define JOIN_(name, dtype) name##_##dtype
#define JOIN(name, dtype) JOIN_(name, dtype)

/* Adding to the bits of a NaN that has its last 17 bits set makes it a zero. Arithmetic keeps the
 * bits of a NaN that it is given, and makes 0x7FC00000 or 0xFFC00000 of none: so there is nothing to
 * guard against where all that is loaded has 16 bits of a float32, the others zero. */
#define HAS_16_BITS(dtype) (dtype != FLOAT32 && dtype != FLOAT16)
#define IS_16_BIT                                                                         \
    (HAS_16_BITS(PARAM) && HAS_16_BITS(GRAD) && HAS_16_BITS(EXP_AVG) &&                   \
     HAS_16_BITS(EXP_AVG_SQ) && HAS_16_BITS(COMPENSATION))

/* The image of a bfloat16 after adding `below` < 2^16 to the bits that are cut off. */
INLINE uint32_t cut(float x, uint32_t below) {
    const uint32_t u = bits_of(x);
    return !IS_16_BIT && is_nan(u) ? 0x7FC00000u : u + below;
}

/* To the dtype: a bfloat16 by what is added below its bits: random ones, or a half for the nearest.
 * The half is 0x8000 in odd steps, 0x7FFF in even ones: so ties go away from zero and towards it in
 * turn. Ties are not rare, since 10 % of a sum of few bits is often one, and to even is three
 * operations more. */
INLINE uint32_t rounded_1(float x, uint32_t below) { return bits_of(x); }
INLINE uint32_t rounded_2(float x, uint32_t below) { return cut(x, below); }
INLINE uint32_t rounded_3(float x, uint32_t below) {
    return bits_of((float)(_Float16)x);
}

typedef struct { uint32_t param, grad, exp_avg, exp_avg_sq, compensation; } Element;

INLINE void step(
    Element *e, const Tensor *t, const Rates *r, uint32_t for_variance, uint32_t for_remainder
) {
    float weight = JOIN(value, PARAM)(e->param);
#if DECAY_OUTSIDE
    weight = JOIN(value, PARAM)(JOIN(rounded, PARAM)(weight * (1 - t->decay_rate), t->half));
#endif
#if COMPENSATION == WORD
    /* The word: 10 more bits of the weight, signed, and 6 more bits of the variance. */
    weight = float_of(bits_of(weight) + (uint32_t)((int32_t)e->compensation >> 16 & ~63));
    const float old_variance = float_of(e->exp_avg_sq | (e->compensation >> 6 & 0xFC00u));
#else
    const float old_variance = JOIN(value, EXP_AVG_SQ)(e->exp_avg_sq);
#if COMPENSATION != NONE
    weight += JOIN(value, COMPENSATION)(e->compensation);
#endif
#endif
    const float g = JOIN(value, GRAD)(e->grad) * r->grad_multiplier;
    const float old_momentum = JOIN(value, EXP_AVG)(e->exp_avg);
    const float momentum = old_momentum + r->one_minus_beta1 * (g - old_momentum);
    const float variance = old_variance + r->one_minus_beta2 * (g * g - old_variance);
    const float denominator = sqrtf(variance) * t->variance_scale + r->eps;
#if !DECAY_OUTSIDE
    weight -= weight * t->decay_rate; /* 1 - rate in float32 would be a few per cent off */
#endif
    weight -= t->step_size * (momentum / denominator);

    e->exp_avg = JOIN(rounded, EXP_AVG)(momentum, t->half);
#if COMPENSATION == WORD
    const uint32_t w = bits_of(weight), v = bits_of(variance);
    const int nan = !IS_16_BIT && is_nan(w), nan_variance = !IS_16_BIT && is_nan(v);
    const uint32_t master = w + (STOCHASTIC_REMAINDER ? for_remainder >> 10 : 32);
    e->param = nan ? 0x7FC00000u : master + 0x8000;
    e->exp_avg_sq = nan_variance ? 0x7FC00000u : v + 512;
    e->compensation = (nan ? 0 : (master & 0xFFC0) << 16)
                    | (nan_variance ? 0 : (v + 512 & 0xFC00u) << 6);
#else
    e->exp_avg_sq = JOIN(rounded, EXP_AVG_SQ)(variance, STOCHASTIC_VARIANCE ? for_variance : t->half);
#if COMPENSATION == NONE
    e->param = JOIN(rounded, PARAM)(weight, STOCHASTIC_REMAINDER ? for_remainder : t->half);
#else
    e->param = JOIN(rounded, PARAM)(weight, t->half);
    const float remainder = weight - JOIN(value, PARAM)(e->param);
    e->compensation =
        JOIN(rounded, COMPENSATION)(remainder, STOCHASTIC_REMAINDER ? for_remainder : t->half);
#endif
#endif
}

static void update_one(const Tensor *t, const Rates *r, int64_t i) {
    JOIN(type, PARAM) *param = t->param;
    JOIN(type, EXP_AVG) *exp_avg = t->exp_avg;
    JOIN(type, EXP_AVG_SQ) *exp_avg_sq = t->exp_avg_sq;
    Element e = {
        .param = JOIN(image, PARAM)(param[i]),
        .grad = JOIN(image, GRAD)(((const JOIN(type, GRAD) *)t->grad)[i]),
        .exp_avg = JOIN(image, EXP_AVG)(exp_avg[i]),
        .exp_avg_sq = JOIN(image, EXP_AVG_SQ)(exp_avg_sq[i]),
    };
#if COMPENSATION != NONE
    JOIN(type, COMPENSATION) *compensation = t->compensation;
    e.compensation = JOIN(image, COMPENSATION)(compensation[i]);
#endif
    step(&e, t, r, STOCHASTIC_VARIANCE ? *variance_bits(t, i) : 0,
         STOCHASTIC_REMAINDER ? *remainder_bits(t, i) : 0);
    param[i] = JOIN(stored, PARAM)(e.param);
    exp_avg[i] = JOIN(stored, EXP_AVG)(e.exp_avg);
    exp_avg_sq[i] = JOIN(stored, EXP_AVG_SQ)(e.exp_avg_sq);
#if COMPENSATION != NONE
    compensation[i] = JOIN(stored, COMPENSATION)(e.compensation);
#endif
}

#if IS_16_BIT
/* Two elements as one word of 32 bits: no lane has to be widened, moved or packed. */
typedef uint32_t __attribute__((aligned(2), may_alias)) Pair;
INLINE uint32_t even(uint32_t pair) { return pair << 16; }
INLINE uint32_t odd(uint32_t pair) { return pair & 0xFFFF0000u; }
INLINE uint32_t paired(uint32_t even, uint32_t odd) { return even >> 16 | (odd & 0xFFFF0000u); }

/* The pairs from begin to end, of one block. */
static void update_pairs(const Tensor *tensor, const Rates *rates, int64_t begin, int64_t end) {
    const Tensor t = *tensor;
    const Rates r = *rates;
    const uint32_t count = (uint32_t)(end - begin);
    const Pair *for_variances = (const Pair *)variance_bits(tensor, 2 * begin);
    const Pair *for_remainders = (const Pair *)remainder_bits(tensor, 2 * begin);
    Pair *param = (Pair *)t.param + begin;
    Pair *exp_avg = (Pair *)t.exp_avg + begin;
    Pair *exp_avg_sq = (Pair *)t.exp_avg_sq + begin;
    Pair *compensation = COMPENSATION == NONE ? 0 : (Pair *)t.compensation + begin;
    const Pair *grad = (const Pair *)t.grad + begin;
    /* The buffers do not overlap, which the compiler cannot see. */
#pragma GCC ivdep
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t for_variance = STOCHASTIC_VARIANCE ? for_variances[i] : 0;
        const uint32_t for_remainder = STOCHASTIC_REMAINDER ? for_remainders[i] : 0;
        const uint32_t p = param[i], g = grad[i], m = exp_avg[i], v = exp_avg_sq[i];
        const uint32_t c = COMPENSATION == NONE ? 0 : compensation[i];
        Element a = {even(p), even(g), even(m), even(v), even(c)};
        Element b = {odd(p), odd(g), odd(m), odd(v), odd(c)};
        step(&a, &t, &r, for_variance & 0xFFFF, for_remainder & 0xFFFF);
        step(&b, &t, &r, for_variance >> 16, for_remainder >> 16);
        param[i] = paired(a.param, b.param);
        exp_avg[i] = paired(a.exp_avg, b.exp_avg);
        exp_avg_sq[i] = paired(a.exp_avg_sq, b.exp_avg_sq);
        if (COMPENSATION != NONE) compensation[i] = paired(a.compensation, b.compensation);
    }
}

static void update(const Tensor *t, const Rates *r, int64_t begin, int64_t end) {
    if (begin & 1) update_one(t, r, begin++);
    if (begin < end && end & 1) update_one(t, r, --end);
    for (int64_t i = begin / 2, next; i < end / 2; i = next) {
        next = ((i >> (BLOCK_BITS - 1)) + 1) << (BLOCK_BITS - 1);
        update_pairs(t, r, i, next < end / 2 ? next : end / 2);
    }
}
#else
static void update(const Tensor *tensor, const Rates *rates, int64_t begin, int64_t end) {
    const Tensor t = *tensor;
    const Rates r = *rates;
#pragma GCC ivdep
    for (int64_t i = begin; i < end; i++) update_one(&t, &r, i);
}
#endif

/* A thread's share: the elements from begin to end of all tensors laid end to end. */
typedef struct {
    const Tensor *tensors;
    int64_t num_tensors, begin, end;
    const Rates *rates;
} Share;

static void *work(void *argument) {
    const Share *share = argument;
    int64_t offset = 0;
    for (int64_t k = 0; k < share->num_tensors && offset < share->end; k++) {
        const Tensor *t = share->tensors + k;
        const int64_t begin = share->begin > offset ? share->begin - offset : 0;
        const int64_t end = share->end - offset < t->numel ? share->end - offset : t->numel;
        if (begin < end) update(t, share->rates, begin, end);
        offset += t->numel;
    }
    return NULL;
}

#define MAX_THREADS 256

void precexp_adamw(
    const Tensor *tensors, int64_t num_tensors, const Rates *rates, int64_t num_threads
) {
    int64_t total = 0;
    for (int64_t k = 0; k < num_tensors; k++) total += tensors[k].numel;
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    pthread_t threads[MAX_THREADS];
    Share shares[MAX_THREADS];
    char started[MAX_THREADS];
    for (int64_t n = 0; n < num_threads; n++) {
        const int64_t begin = n ? shares[n - 1].end : 0;
        const int64_t end = n + 1 == num_threads ? total : total / num_threads * (n + 1);
        shares[n] = (Share){tensors, num_tensors, begin, end, rates};
        started[n] = n > 0 && pthread_create(threads + n, NULL, work, shares + n) == 0;
    }
    for (int64_t n = 0; n < num_threads; n++)
        if (!started[n]) work(shares + n);
    for (int64_t n = 0; n < num_threads; n++)
        if (started[n]) pthread_join(threads[n], NULL);
}

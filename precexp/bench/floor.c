/* The memory traffic of a bf16 Kahan AdamW step and next to no arithmetic: 5 streams read, 4 written. */
#include <stdint.h>

void precexp_floor(
    uint16_t *restrict a, uint16_t *restrict b, uint16_t *restrict c, uint16_t *restrict d,
    const uint16_t *restrict e, int64_t count
) {
    for (int64_t i = 0; i < count; i++) {
        const uint16_t x = e[i];
        a[i] += x;
        b[i] ^= x;
        c[i] += x;
        d[i] ^= x;
    }
}

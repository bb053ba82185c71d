/* A matrix operand out of a CTA's shared memory: every 16-byte piece is checked, then all are gathered into dense fp32.
 *
 * A tile has a fixed size; a kernel with fewer rows lets it read whatever lies behind them and never looks at what comes of it.
 * So only row 0 (of M or N; for MN-major operands the rows of the first piece) must be initialised and ordered before the
 * operation. Of other rows, what is not becomes NaN in the product, which no kernel can use unnoticed. Bounds hold for all,
 * and integer kinds, which have no NaN, are strict throughout. */
#ifndef EMU_TENSOR_OPERAND_H
#define EMU_TENSOR_OPERAND_H

#include "../machine.h"
#include "smem_layout.h"

#define EMU_MAX_PIECES 1024

/* Rows [first, first + mn) of the operand, as out[mn * s_mn + k * s_k]. An operand of which a piece may not be read counts as
 * zeros; the findings are made. The asynchronous operation has begun. */
static inline void emu_gather_shared(emu_warp *w, const emu_cta *cta, const emu_descriptor *d, int mn_major, int first, int mn,
                                     int k, emu_format f, int negate, float *out, int s_mn, int s_k) {
    uint32_t pieces[EMU_MAX_PIECES], rank = cta->rank << EMU_SHARED_RANK_SHIFT;
    uint16_t unsettled[EMU_MAX_PIECES];
    int per = 16 / emu_format_bytes(f), count = emu_operand_pieces(d, mn_major, first, mn, k, emu_format_bytes(f), pieces);
    int columns = (mn_major ? mn : k) / per, bad = 0, holes = 0, integer = f == EMU_S8 || f == EMU_U8;
    for (int i = 0; i < count && !bad; i++) {
        int row = mn_major ? first / per + i % columns : first + i / columns;
        if (pieces[i] >= EMU_DESCRIPTOR_WINDOW) {
            emu_finding(w, EMU_F_DESCRIPTOR, "an operand reaches shared offset 0x%x", pieces[i]);
            bad = 1;
        } else if (row && !integer && !emu_settled(w, rank | pieces[i], 16, EMU_ASYNC)) unsettled[holes++] = (uint16_t)i;
        else bad = !emu_shared(w, rank | pieces[i], 16, EMU_READ | EMU_ASYNC);
    }
    if (bad) {
        for (int i = 0; i < mn; i++)
            for (int j = 0; j < k; j++) out[i * s_mn + j * s_k] = 0;
        return;
    }
    emu_gather(cta->shared, pieces, mn_major, mn, k, f, negate, out, s_mn, s_k);
    for (int h = 0; h < holes; h++) {
        int row = unsettled[h] / columns, column = unsettled[h] % columns * per;
        for (int i = 0; i < per; i++)
            out[mn_major ? (column + i) * s_mn + row * s_k : row * s_mn + (column + i) * s_k] = emu_bits_f32(0x7fc00000u);
    }
}

#endif

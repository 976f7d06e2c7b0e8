// Assembles the kernels over the sixteen-lane vector of PEGA_ISA, included before this file. Everything is in
// that namespace and static, so that no other unit can be linked to code its processor does not have.
#pragma once

// clang-format off: each stands on what comes before it
#include "rows.h"
#include "gemm.h"
#include "attend.h"
#include "sample.h"
#include "recurrent.h"
// clang-format on

#define PEGA_STRING2(x) #x
#define PEGA_STRING(x) PEGA_STRING2(x)

namespace pega::PEGA_ISA {

static const Kernels kTable = {
    PEGA_STRING(PEGA_ISA),
    gemm_f32,
    gemm_i8,
    nullptr,  // gemm_bf16 and round_bf16 are not for every processor of an instruction set
    nullptr,
    quantise,
    rms_norm,
    silu_mul,
    add_rows,
    rope,
    attend,
    merge,
    maximum,
    sum_exp,
    draw_weights,
    sum_weights,
    select_at_least,
    divide,
    sigmoid_mul,
    unit,
    conv_silu,
    delta,
    dot,
    add_weighted,
};

}  // namespace pega::PEGA_ISA

#define PEGA_ISA avx512
#include "vec_avx512.h"
//
#include "table.h"

namespace pega {

const Kernels* avx512_kernels() {
    static const Kernels table = [] {
        Kernels t = avx512::kTable;
        if (__builtin_cpu_supports("avx512bf16")) {
            t.gemm_bf16 = avx512_gemm_bf16;
            t.round_bf16 = avx512_round_bf16;
        }
        return t;
    }();
    return &table;
}

}  // namespace pega

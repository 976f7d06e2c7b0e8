#define PEGA_ISA avx512
#include "vec_avx512.h"
//
#include "table.h"

namespace pega {

const Kernels* avx512_kernels() {
    return &avx512::kTable;
}

}  // namespace pega

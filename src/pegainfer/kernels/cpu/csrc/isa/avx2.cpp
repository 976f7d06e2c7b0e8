#define PEGA_ISA avx2
#include "vec_avx2.h"
//
#include "table.h"

namespace pega {

const Kernels* avx2_kernels() {
    return &avx2::kTable;
}

}  // namespace pega

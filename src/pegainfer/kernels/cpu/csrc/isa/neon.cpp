#define PEGA_ISA neon
#include "vec_neon.h"
//
#include "table.h"

namespace pega {

const Kernels* neon_kernels() {
    return &neon::kTable;
}

}  // namespace pega

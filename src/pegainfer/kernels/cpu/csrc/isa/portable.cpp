#define PEGA_ISA portable
#include "vec_portable.h"
//
#include "table.h"

namespace pega {

const Kernels* portable_kernels() {
    return &portable::kTable;
}

}  // namespace pega

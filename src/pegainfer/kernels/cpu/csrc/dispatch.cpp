// Which instruction set runs.
#include "kernels.h"

#if defined(PEGA_ARM64) && defined(__linux__)
#include <sys/auxv.h>

#include <asm/hwcap.h>
#endif

namespace pega {

namespace {

struct Choice {
    const char* name;
    const Kernels* (*get)();
    bool (*supported)();
};

bool always() {
    return true;
}

#ifdef PEGA_X86
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

#ifdef PEGA_ARM64
bool has_neon() {
#ifdef __linux__
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return true;  // Apple's 64-bit Arm machines have had the dot product from the first
#endif
}
#endif

// Best first.
const Choice kChoices[] = {
#ifdef PEGA_X86
    {"avx512", avx512_kernels, has_avx512},
    {"avx2", avx2_kernels, has_avx2},
#endif
#ifdef PEGA_ARM64
    {"neon", neon_kernels, has_neon},
#endif
    {"portable", portable_kernels, always},
};

}  // namespace

const Kernels* choose_kernels(const char* name) {
    for (const Choice& c : kChoices) {
        const bool wanted = name == nullptr || name[0] == '\0' || std::strcmp(name, c.name) == 0;
        if (wanted && c.supported()) return c.get();
    }
    return nullptr;
}

}  // namespace pega

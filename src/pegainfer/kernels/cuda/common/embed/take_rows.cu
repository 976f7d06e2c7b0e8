// op embedding, gather_rows: out[i] = table[ids[i]], a block a row.
#include "ptx.cuh"

// table: [V, M], out: [T, M]; an id outside of [0, V) gives a row of zeros rather than a wild read.
template <typename T, int N>
__device__ __forceinline__ void take_rows(T* out, const T* table, const int* ids, int m, int v) {
    pdl_wait();
    pdl_launch();
    const int id = ids[blockIdx.x];
    const bool valid = id >= 0 && id < v;
    const T* from = table + static_cast<int64_t>(valid ? id : 0) * m;
    T* to = out + static_cast<int64_t>(blockIdx.x) * m;
    for (int i = threadIdx.x * N; i < m; i += blockDim.x * N) {
        Vec<T, N> row = {};
        if (valid) row = load<T, N>(from + i);
        store(to + i, row);
    }
}

#define KERNEL(NAME, T, N)                                           \
    extern "C" __global__ void __launch_bounds__(1024)               \
        NAME(T* out, const T* table, const int* ids, int m, int v) { \
        take_rows<T, N>(out, table, ids, m, v);                      \
    }

// variant take_rows_16: dtype=bf16,f16 multiple=8
KERNEL(take_rows_16, uint16_t, 8)
// variant take_rows_16_any: dtype=bf16,f16 multiple=1
KERNEL(take_rows_16_any, uint16_t, 1)
// variant take_rows_32: dtype=f32 multiple=4
KERNEL(take_rows_32, uint32_t, 4)
// variant take_rows_32_any: dtype=f32 multiple=1
KERNEL(take_rows_32_any, uint32_t, 1)

// Quantised rows and their scales into the grouped buffer: each row is read once and written at every slot of its
// token; scales of rows without a token become neutral. One launch, nothing shared between blocks, so no order matters.

#define SHARED(p) static_cast<unsigned>(__cvta_generic_to_shared(p))

// A copy by the copy engine; the barrier's phase 0 ends when all bytes are there.
__device__ __forceinline__ void fetch(void* to, const void* from, unsigned bytes, unsigned long long* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;"
                 :: "r"(SHARED(barrier)) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(SHARED(barrier)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(SHARED(to)), "l"(from), "r"(bytes), "r"(SHARED(barrier)) : "memory");
}

__device__ __forceinline__ void await(unsigned long long* barrier) {
    unsigned done = 0;
    while (!done)
        asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}" : "=r"(done) : "r"(SHARED(barrier)) : "memory");
}

__device__ __forceinline__ void store(void* to, const void* from, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(to), "r"(SHARED(from)), "r"(bytes) : "memory");
}

// The stage may be given up only after this.
__device__ __forceinline__ void await_stores() {
    asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;" ::: "memory");
}

// x: [tokens, row_bytes], a multiple of 16. scales: [words, stride]. slots: [tokens, choices]. source: [leads, rows].
// out: [leads, rows, row_bytes]. out_scales: [leads, words, out_stride]. The first `fill` blocks fill padding, the
// others take `staged` tokens each, at most one a warp; shared memory holds their rows.
__global__ void jaxmoe_permute_rows(const char* __restrict__ x, const unsigned* __restrict__ scales,
                                    const int* __restrict__ slots, const int* __restrict__ source,
                                    char* __restrict__ out, unsigned* __restrict__ out_scales, int tokens, int choices,
                                    int row_bytes, int words, int stride, int leads, int rows, int out_stride,
                                    int staged, int fill, unsigned neutral) {
    extern __shared__ __align__(128) char stage[];
    __shared__ unsigned long long arrived[32];
    if (blockIdx.x < fill) {
        const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
        const long long lead = i / out_stride, column = i % out_stride;
        if (lead >= leads || (column < rows && source[lead * rows + column] >= 0)) return;
        for (int w = 0; w < words; ++w) out_scales[(lead * words + w) * out_stride + column] = neutral;
        return;
    }
    const int first = (blockIdx.x - fill) * staged, count = min(staged, tokens - first);
    const int warp = threadIdx.x / 32;
    const int* mine = slots + static_cast<long long>(first + warp) * choices;
    bool wanted = false;
    if (threadIdx.x % 32 == 0 && warp < count) {
        for (int k = 0; k < choices; ++k) wanted |= mine[k] >= 0;
        if (wanted)
            fetch(stage + warp * row_bytes, x + static_cast<long long>(first + warp) * row_bytes, row_bytes,
                  &arrived[warp]);
    }
    for (int i = threadIdx.x; i < words * count; i += blockDim.x) {
        const int word = i / count, token = first + i % count;
        const unsigned scale = scales[static_cast<long long>(word) * stride + token];
        for (int k = 0; k < choices; ++k) {
            const int slot = slots[static_cast<long long>(token) * choices + k];
            if (slot < 0) continue;
            const int lead = leads == 1 ? 0 : slot / rows;
            out_scales[(static_cast<long long>(lead) * words + word) * out_stride + (slot - lead * rows)] = scale;
        }
    }
    if (wanted) {
        await(&arrived[warp]);
        for (int k = 0; k < choices; ++k)
            if (mine[k] >= 0)
                store(out + static_cast<long long>(mine[k]) * row_bytes, stage + warp * row_bytes, row_bytes);
        await_stores();
    }
}

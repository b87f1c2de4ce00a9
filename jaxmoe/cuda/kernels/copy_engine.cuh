// Copies between global and shared memory by the copy engine. Addresses and sizes are multiples of 16 bytes.

#define SHARED(p) static_cast<unsigned>(__cvta_generic_to_shared(p))

// One thread fetches; the barrier's phase 0 ends when all bytes are there.
__device__ __forceinline__ void fetch(void* to, const void* from, unsigned bytes, unsigned long long* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;"
                 :: "r"(SHARED(barrier)) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(SHARED(barrier)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(SHARED(to)), "l"(from), "r"(bytes), "r"(SHARED(barrier)) : "memory");
}

// Threads other than the fetching one meet it before they wait.
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

// The same of lines that are to be the first to leave the L2 cache.
__device__ __forceinline__ void store_through(void* to, const void* from, unsigned bytes) {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;"
                 :: "l"(to), "r"(SHARED(from)), "r"(bytes), "l"(policy) : "memory");
}

// A thread's shared memory may be given up only after this.
__device__ __forceinline__ void await_stores() {
    asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;" ::: "memory");
}

// The kernel of permute_rows.cuh run by threads of the host, block after block. The copy engine copies at once: waits
// and fences are not what is tested here, but every address is.

#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__ static
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Extents { unsigned x; };

namespace {
constexpr int kWarps = 8;
constexpr unsigned kThreads = 32 * kWarps;

thread_local Extents blockIdx, threadIdx;
constexpr Extents blockDim{kThreads};
Extents gridDim;
std::size_t shared_bytes;
std::unique_ptr<std::barrier<>> block_barrier, warp_barriers[kWarps];
bool votes[kThreads];

using std::min;

void __syncthreads() { block_barrier->arrive_and_wait(); }
void __syncwarp() { warp_barriers[threadIdx.x / 32]->arrive_and_wait(); }

bool __any_sync(unsigned, bool vote) {
    votes[threadIdx.x] = vote;
    __syncwarp();
    const bool* mine = votes + threadIdx.x / 32 * 32;
    const bool any = std::any_of(mine, mine + 32, [](bool v) { return v; });
    __syncwarp();
    return any;
}

void Check(bool good, const char* what) {
    if (good) return;
    std::fprintf(stderr, "permute_rows: %s\n", what);
    std::abort();
}
}  // namespace

alignas(128) char stage[256 * 1024];

namespace {
void Copy(void* to, const void* from, unsigned bytes, const char* shared) {
    Check((reinterpret_cast<std::size_t>(to) | reinterpret_cast<std::size_t>(from) | bytes) % 16 == 0, "not aligned");
    Check(shared >= stage && shared + bytes <= stage + shared_bytes, "outside of shared memory");
    std::memcpy(to, from, bytes);
}
void fetch(void* to, const void* from, unsigned bytes, unsigned long long*) {
    Copy(to, from, bytes, static_cast<char*>(to));
}
void store(void* to, const void* from, unsigned bytes) { Copy(to, from, bytes, static_cast<const char*>(from)); }
void store_through(void* to, const void* from, unsigned bytes) { store(to, from, bytes); }
void __stcs(uint4* to, uint4 value) { *to = value; }
void await(unsigned long long*) {}
void await_stores() {}
}  // namespace

#include "jaxmoe/cuda/kernels/permute_rows.cuh"

// p: the six pointers; n: the fifteen integers.
extern "C" void run(unsigned grid, unsigned threads, unsigned bytes, void** p, const unsigned* n) {
    Check(threads == kThreads && bytes <= sizeof(stage), "unlike what is run here");
    shared_bytes = bytes;
    gridDim.x = grid;
    block_barrier = std::make_unique<std::barrier<>>(kThreads);
    for (auto& barrier : warp_barriers) barrier = std::make_unique<std::barrier<>>(32);
    std::vector<std::thread> all;
    for (unsigned thread = 0; thread < kThreads; ++thread)
        all.emplace_back([=] {
            threadIdx.x = thread;
            for (unsigned block = 0; block < grid; ++block) {
                blockIdx.x = block;
                jaxmoe_permute_rows(static_cast<char*>(p[0]), static_cast<unsigned*>(p[1]), static_cast<int*>(p[2]),
                                    static_cast<int*>(p[3]), static_cast<char*>(p[4]), static_cast<unsigned*>(p[5]),
                                    n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12],
                                    n[13], n[14]);
                __syncthreads();
                if (thread == 0) std::memset(stage, 0xA5, bytes);
                __syncthreads();
            }
        });
    for (auto& thread : all) thread.join();
}

// Every rank's ids on every rank, through the buffers of a peer context. One block, so that it runs beside anything; it
// waits for the other ranks as DeepEP's kernels do, with their time-out and in the order of their calls.

#include <deep_ep/common/comm.cuh>

// ids: [count]. out: [ranks, count]. base: records of this rank, of which nothing is of value between two calls.
template <int kRanks, long long kTimeoutCycles>
__global__ void __launch_bounds__(1024, 1) jaxmoe_gather_ids(const int* __restrict__ ids, int* __restrict__ out, int count,
                                                             const ncclDevComm_t comm, const ncclWindow_t window,
                                                             void* base, void* workspace, int rank) {
    namespace ep = deep_ep::elastic;
    const auto layout = ep::layout::WorkspaceLayout(workspace, 1, kRanks, 0);
    const auto gin = ep::handle::NCCLGin(comm, window, 0);
    const int thread = threadIdx.x;
    int* own = static_cast<int*>(base);

    auto meet = [&] {
        __threadfence_system();
        __syncthreads();
        if constexpr (kRanks > 1)
            ep::comm::nvlink_barrier_wo_local_sync<kRanks, 1, 1024, kTimeoutCycles, ep::comm::kKernelBarrierTag>(
                gin, layout, rank, 0, thread);
        __syncthreads();
    };

    meet();  // nobody reads the buffers any more
    for (int peer = 0; peer < kRanks; ++peer) {
        int* there = gin.template get_sym_ptr<ncclTeamTagLsa>(own + static_cast<long long>(rank) * count, peer);
        for (int i = thread; i < count; i += blockDim.x) there[i] = ids[i];
    }
    meet();
    for (int i = thread; i < kRanks * count; i += blockDim.x) out[i] = __ldcg(own + i);
}

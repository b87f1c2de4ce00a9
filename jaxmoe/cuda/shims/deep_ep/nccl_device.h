// Stands for NCCL's device header. A window is a table of peer base addresses that EpContext writes; a communicator is
// a rank and a size. The network interface (GIN) has the members the kernels name; between GPUs that reach each other
// directly no call of it is reached, so each one traps.
#pragma once

#include <nccl.h>

#include <cuda/atomic>
#include <tuple>
#include <type_traits>
#include <utility>

struct jaxmoe_peer_table {
    char* base[1];  // as many as there are ranks
};

// jaxmoe/cuda/deepep/specs.py writes these 20 bytes.
struct ncclDevComm {
    int rank;
    int nRanks;
    int lsaRank;
    int lsaSize;
    uint32_t ginContextCount;
};
typedef ncclDevComm ncclDevComm_t;
static_assert(sizeof(ncclDevComm) == 20, "specs.py passes it by value");

struct ncclTeam {
    int nRanks;
    int rank;
    int stride;
};
struct ncclTeamTagWorld {};
struct ncclTeamTagLsa {};
struct ncclTeamTagRail {};

__device__ __forceinline__ ncclTeam ncclTeamWorld(const ncclDevComm& comm) { return {comm.nRanks, comm.rank, 1}; }
__device__ __forceinline__ ncclTeam ncclTeamLsa(const ncclDevComm& comm) { return {comm.lsaSize, comm.lsaRank, 1}; }
__device__ __forceinline__ ncclTeam ncclTeamRail(const ncclDevComm&) { return {1, 0, 1}; }

__device__ __forceinline__ void* ncclGetLsaPointer(ncclWindow_t window, size_t offset, int peer) {
    return window->base[peer] + offset;
}

typedef uint32_t ncclGinSignal_t;
struct ncclGinRequest_t {};
enum ncclGinResourceSharingMode : uint8_t { NCCL_GIN_RESOURCE_SHARING_GPU, NCCL_GIN_RESOURCE_SHARING_CTA };
enum ncclGinOptFlags { ncclGinOptFlagsDefault = 0, ncclGinOptFlagsAggregateRequests = 2 };
struct ncclGin_None {};
struct ncclGin_SegmentDevice {};
struct ncclGin_SignalInc {
    ncclGinSignal_t signal;
};
struct ncclGin_VASignalAdd {
    __device__ ncclGin_VASignalAdd(ncclWindow_t, int64_t, uint64_t) {}
};
struct ncclCoopThread {};
struct ncclCoopWarp {};
struct ncclGinGdakiGPUContext {
    struct {
        void* buffer;
    } signals_table;
};

struct ncclGin {
    void* _ginHandle = nullptr;
    uint32_t contextId = 0;

    __device__ ncclGin(const ncclDevComm&, int, ncclGinResourceSharingMode) {}

    template <typename... Args>
    __device__ void flush(Args&&...) const {
        __trap();
    }
    template <typename... Args>
    __device__ void flushAsync(Args&&...) const {
        __trap();
    }
    template <typename... Args>
    __device__ void get(Args&&...) const {
        __trap();
    }
    template <typename... Args>
    __device__ void put(Args&&...) const {
        __trap();
    }
    template <typename... Args>
    __device__ void putValue(Args&&...) const {
        __trap();
    }
    template <typename... Args>
    __device__ void signal(Args&&...) const {
        __trap();
    }
    template <typename... Args>
    __device__ void wait(Args&&...) const {
        __trap();
    }
    __device__ uint64_t* getSignalShadowPtr(ncclGinSignal_t) const {
        __trap();
        return nullptr;
    }
};

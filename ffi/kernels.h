// The process-wide table of loaded kernels: one cubin, one library, one kernel per key, kept for the life of the
// process and shared by every executable and device.
#ifndef JAXMOE_FFI_KERNELS_H_
#define JAXMOE_FFI_KERNELS_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/driver.h"
#include "ffi/status.h"

namespace jaxmoe {

inline constexpr int kMaxDevices = 64;

class LoadedKernel {
 public:
  LoadedKernel(const cuda::Driver& driver, cuda::Kernel handle, std::vector<std::size_t> param_bytes)
      : driver_(driver), handle_(handle), param_bytes_(std::move(param_bytes)) {}

  cuda::Kernel handle() const { return handle_; }

  // Size of each parameter, as the kernel was compiled.
  const std::vector<std::size_t>& param_bytes() const { return param_bytes_; }

  // Loads the kernel on `device` and allows it `dynamic_smem` bytes there. Both happen once; afterwards this is one
  // atomic load.
  Status Prepare(int device, std::uint32_t dynamic_smem) {
    if (device >= 0 && device < kMaxDevices &&
        allowed_smem_[device].load(std::memory_order_acquire) > static_cast<std::int64_t>(dynamic_smem)) {
      return {};
    }
    return PrepareSlowly(device, dynamic_smem);
  }

 private:
  Status PrepareSlowly(int device, std::uint32_t dynamic_smem);

  const cuda::Driver& driver_;
  const cuda::Kernel handle_;
  const std::vector<std::size_t> param_bytes_;
  std::mutex mutex_;
  std::atomic<std::int64_t> allowed_smem_[kMaxDevices] = {};  // bytes + 1; 0 before the kernel is loaded there
};

// Where `<key>.cubin` files lie.
void SetCubinDirectory(std::string directory);

// The kernel of `key`, loaded on first use. `name` is for messages.
Status FindKernel(const cuda::Driver& driver, const std::string& key, const std::string& name, LoadedKernel** kernel);

}  // namespace jaxmoe

#endif  // JAXMOE_FFI_KERNELS_H_

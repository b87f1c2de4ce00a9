// The launches of one custom call, ready to run: what an XLA executable keeps between calls.
#ifndef JAXMOE_FFI_PROGRAM_H_
#define JAXMOE_FFI_PROGRAM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ffi/driver.h"
#include "ffi/kernels.h"
#include "ffi/spec.h"
#include "ffi/status.h"

namespace jaxmoe {

struct DeviceBuffer {
  void* data;
  std::uint64_t bytes;
};

// The arguments and results of one call; both arrays hold at most kMaxBuffers.
struct CallBuffers {
  const DeviceBuffer* arguments;
  std::size_t argument_count;
  const DeviceBuffer* results;
  std::size_t result_count;
};

// Thread-safe once created; different devices and streams may launch at the same time.
class Program {
 public:
  // Decodes the specification, loads its cubins and checks the parameter lists against the kernels.
  static Status Create(const unsigned char* spec, std::size_t size, std::unique_ptr<Program>* program);

  // Makes every kernel ready on `device`. Launch does it too; calling it first keeps loading out of stream capture.
  Status Prepare(int device) const;

  // Enqueues the launches in order. Does not allocate, block or synchronise once `device` is prepared.
  Status Launch(const CallBuffers& buffers, int device, cuda::Stream stream) const;

 private:
  struct Step {
    LaunchSpec spec;
    LoadedKernel* kernel = nullptr;
    cuda::LaunchAttribute attributes[3] = {};
    unsigned attribute_count = 0;
  };

  Status LaunchStep(const Step& step, const CallBuffers& buffers, int device, cuda::Stream stream) const;
  Status Explain(std::size_t index, Status status) const;

  const cuda::Driver* driver_ = nullptr;
  std::string target_;
  std::vector<Step> steps_;
};

}  // namespace jaxmoe

#endif  // JAXMOE_FFI_PROGRAM_H_

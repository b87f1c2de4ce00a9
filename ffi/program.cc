#include "ffi/program.h"

#include <cstring>
#include <string>
#include <utility>

namespace jaxmoe {
namespace {

// What the parameter pointers of one launch point at.
struct Frame {
  cuda::TensorMap maps[kMaxTensorMaps];
  std::uint64_t words[kMaxParams];
  alignas(16) unsigned char structs[kMaxStructBytes];
  void* params[kMaxParams];
};

constexpr std::uint32_t kOnes[5] = {1, 1, 1, 1, 1};

std::string Triple(const std::uint32_t (&v)[3]) {
  return "(" + std::to_string(v[0]) + ", " + std::to_string(v[1]) + ", " + std::to_string(v[2]) + ")";
}

std::string Geometry(const LaunchSpec& spec) {
  return "grid " + Triple(spec.grid) + ", block " + Triple(spec.block) + ", dynamic shared memory " +
         std::to_string(spec.dynamic_smem) + " bytes, cluster " + std::to_string(spec.cluster) +
         (spec.cooperative ? ", cooperative" : "") + (spec.pdl ? ", pdl" : "");
}

std::string BufferName(const BufferRef& buffer) {
  return (buffer.is_result ? "result " : "argument ") + std::to_string(buffer.index);
}

std::size_t ParamBytes(const Param& param) {
  if (auto* integer = std::get_if<IntegerParam>(&param)) return integer->width;
  if (auto* bytes = std::get_if<StructParam>(&param)) return bytes->bytes.size();
  if (auto* peer = std::get_if<PeerParam>(&param)) return PeerFieldBytes(peer->field);
  if (std::holds_alternative<TensorMapParam>(param)) return sizeof(cuda::TensorMap);
  return sizeof(void*);
}

// A list that differs from the kernel's would make the driver read behind the parameter array.
Status CheckParams(const LaunchSpec& spec, const std::vector<std::size_t>& kernel_bytes) {
  if (spec.params.size() != kernel_bytes.size()) {
    return InvalidArgument("the specification has " + std::to_string(spec.params.size()) +
                           " parameters, the kernel takes " + std::to_string(kernel_bytes.size()));
  }
  for (std::size_t i = 0; i < kernel_bytes.size(); ++i) {
    if (ParamBytes(spec.params[i]) != kernel_bytes[i]) {
      return InvalidArgument("parameter " + std::to_string(i) + " has " + std::to_string(ParamBytes(spec.params[i])) +
                             " bytes in the specification, " + std::to_string(kernel_bytes[i]) + " in the kernel");
    }
  }
  return {};
}

Status Resolve(const BufferRef& buffer, const CallBuffers& buffers, std::uint32_t alignment, std::uint64_t* address) {
  std::size_t count = buffer.is_result ? buffers.result_count : buffers.argument_count;
  if (buffer.index >= count) {
    return InvalidArgument(BufferName(buffer) + " does not exist: the call has " + std::to_string(count));
  }
  const DeviceBuffer& given = (buffer.is_result ? buffers.results : buffers.arguments)[buffer.index];
  if (buffer.offset + buffer.extent > given.bytes) {
    return InvalidArgument("the kernel uses bytes " + std::to_string(buffer.offset) + ".." +
                           std::to_string(buffer.offset + buffer.extent) + " of " + BufferName(buffer) +
                           ", which has " + std::to_string(given.bytes) + " bytes");
  }
  *address = reinterpret_cast<std::uint64_t>(given.data) + buffer.offset;
  if (*address % alignment != 0) {
    return InvalidArgument(BufferName(buffer) + " at byte offset " + std::to_string(buffer.offset) +
                           " is not aligned to the " + std::to_string(alignment) + " bytes that its tensor map needs");
  }
  return {};
}

Status CopyStruct(const StructParam& param, int device, unsigned char* copy) {
  std::memcpy(copy, param.bytes.data(), param.bytes.size());
  for (const StructParam::Patch& patch : param.patches) {
    std::uint64_t value = 0;
    if (Status status = ResolvePeer(patch.peer.context, device, patch.peer.field, &value); !status.ok()) return status;
    std::memcpy(copy + patch.offset, &value, PeerFieldBytes(patch.peer.field));
  }
  return {};
}

}  // namespace

Status Program::Create(const unsigned char* data, std::size_t size, std::unique_ptr<Program>* program) {
  CallSpec spec;
  if (Status status = Decode(data, size, &spec); !status.ok()) return status;
  auto fresh = std::make_unique<Program>();
  fresh->target_ = std::move(spec.target);
  // Without launches there is nothing to do, and no need of a driver.
  if (!spec.launches.empty()) {
    if (Status status = cuda::Driver::Load(&fresh->driver_); !status.ok()) {
      return {status.code, "target '" + fresh->target_ + "': " + status.message};
    }
  }
  for (LaunchSpec& launch : spec.launches) {
    Step& step = fresh->steps_.emplace_back();
    step.spec = std::move(launch);
    auto add = [&step](cuda::LaunchAttributeId id) -> cuda::LaunchAttributeValue& {
      cuda::LaunchAttribute& attribute = step.attributes[step.attribute_count++];
      attribute.id = id;
      return attribute.value;
    };
    if (step.spec.cooperative) add(cuda::kCooperative).cooperative = 1;
    if (step.spec.cluster > 1) add(cuda::kClusterDimension).cluster = {step.spec.cluster, 1, 1};
    if (step.spec.pdl) add(cuda::kProgrammaticStreamSerialization).programmatic_stream_serialization = 1;
  }
  for (std::size_t i = 0; i < fresh->steps_.size(); ++i) {
    Step& step = fresh->steps_[i];
    Status status = FindKernel(*fresh->driver_, step.spec.cubin, step.spec.name, &step.kernel);
    if (status.ok()) status = CheckParams(step.spec, step.kernel->param_bytes());
    if (!status.ok()) return fresh->Explain(i, std::move(status));
  }
  *program = std::move(fresh);
  return {};
}

Status Program::Prepare(int device) const {
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    if (Status status = steps_[i].kernel->Prepare(device, steps_[i].spec.dynamic_smem); !status.ok()) {
      return Explain(i, std::move(status));
    }
  }
  return {};
}

Status Program::Launch(const CallBuffers& buffers, int device, cuda::Stream stream) const {
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    if (Status status = LaunchStep(steps_[i], buffers, device, stream); !status.ok()) {
      status.message += " on device " + std::to_string(device);
      return Explain(i, std::move(status));
    }
  }
  return {};
}

Status Program::LaunchStep(const Step& step, const CallBuffers& buffers, int device, cuda::Stream stream) const {
  const LaunchSpec& spec = step.spec;
  if (Status status = step.kernel->Prepare(device, spec.dynamic_smem); !status.ok()) return status;
  Frame frame;
  std::size_t maps = 0;
  for (std::size_t i = 0; i < spec.params.size(); ++i) {
    const Param& param = spec.params[i];
    std::uint64_t& word = frame.words[i];
    word = 0;
    frame.params[i] = &word;
    Status status;
    if (auto* pointer = std::get_if<PointerParam>(&param)) {
      status = Resolve(pointer->buffer, buffers, 1, &word);
    } else if (auto* integer = std::get_if<IntegerParam>(&param)) {
      word = integer->value;
    } else if (auto* peer = std::get_if<PeerParam>(&param)) {
      status = ResolvePeer(peer->context, device, peer->field, &word);
    } else if (auto* bytes = std::get_if<StructParam>(&param)) {
      frame.params[i] = frame.structs + bytes->scratch;
      status = CopyStruct(*bytes, device, frame.structs + bytes->scratch);
    } else if (auto* map = std::get_if<TensorMapParam>(&param)) {
      frame.params[i] = &frame.maps[maps];
      status = Resolve(map->buffer, buffers, map->alignment, &word);
      if (status.ok()) {
        auto result = driver_->TensorMapEncodeTiled(
            &frame.maps[maps], map->type, map->rank, reinterpret_cast<void*>(word), map->dims, map->strides, map->box,
            kOnes, cuda::kInterleaveNone, map->swizzle, cuda::kPromotion256B, cuda::kFillZero);
        if (result != 0) status = Internal(driver_->Describe("cuTensorMapEncodeTiled", result));
      }
      ++maps;
    }
    if (!status.ok()) {
      status.message = "parameter " + std::to_string(i) + ": " + status.message;
      return status;
    }
  }
  cuda::LaunchConfig config{{spec.grid[0], spec.grid[1], spec.grid[2]},
                            {spec.block[0], spec.block[1], spec.block[2]},
                            spec.dynamic_smem,
                            stream,
                            const_cast<cuda::LaunchAttribute*>(step.attributes),
                            step.attribute_count};
  if (auto result = driver_->LaunchKernelEx(&config, step.kernel->handle(), frame.params, nullptr); result != 0) {
    return Internal(driver_->Describe("cuLaunchKernelEx", result));
  }
  return {};
}

Status Program::Explain(std::size_t index, Status status) const {
  const LaunchSpec& spec = steps_[index].spec;
  return {status.code, "target '" + target_ + "', launch " + std::to_string(index + 1) + " of " +
                           std::to_string(steps_.size()) + ", kernel '" + spec.name + "' (cubin '" + spec.cubin +
                           "'; " + Geometry(spec) + "): " + status.message};
}

}  // namespace jaxmoe

// What Python reaches through ctypes: the XLA FFI handlers, the set-up calls, and the same launch path without XLA for
// tests and measurements.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "ffi/context.h"
#include "ffi/kernels.h"
#include "ffi/program.h"
#include "ffi/status.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {
namespace {

namespace ffi = ::xla::ffi;

// What XLA keeps for an executable between its Instantiate and its last Execute.
struct Executable {
  static ffi::TypeId id;
  std::unique_ptr<Program> program;
};
ffi::TypeId Executable::id = XLA_FFI_UNKNOWN_TYPE_ID;

ffi::Error ToXla(Status status) {
  switch (status.code) {
    case Code::kOk:
      return ffi::Error::Success();
    case Code::kInvalidArgument:
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::move(status.message));
    case Code::kNotFound:
      return ffi::Error(ffi::ErrorCode::kNotFound, std::move(status.message));
    case Code::kUnavailable:
      return ffi::Error(ffi::ErrorCode::kUnavailable, std::move(status.message));
    case Code::kInternal:
      break;
  }
  return ffi::Error(ffi::ErrorCode::kInternal, std::move(status.message));
}

ffi::ErrorOr<std::unique_ptr<Executable>> Instantiate(ffi::Span<const std::uint8_t> spec) {
  auto executable = std::make_unique<Executable>();
  if (Status status = Program::Create(spec.begin(), spec.size(), &executable->program); !status.ok()) {
    return ffi::Unexpected(ToXla(std::move(status)));
  }
  return executable;
}

ffi::Error Initialize(std::int32_t device, Executable* executable) {
  return ToXla(executable->program->Prepare(device));
}

template <typename Buffers>
Status Collect(const Buffers& given, const char* what, DeviceBuffer (&buffers)[kMaxBuffers]) {
  if (given.size() > kMaxBuffers) {
    return InvalidArgument("jaxmoe: the call has " + std::to_string(given.size()) + " " + what + ", at most " +
                           std::to_string(kMaxBuffers) + " are supported");
  }
  for (std::size_t i = 0; i < given.size(); ++i) {
    auto buffer = given.template get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return Internal(buffer.error().message());
    if constexpr (std::is_same_v<Buffers, ffi::RemainingRets>) {
      buffers[i] = {(*buffer)->untyped_data(), (*buffer)->size_bytes()};
    } else {
      buffers[i] = {buffer->untyped_data(), buffer->size_bytes()};
    }
  }
  return {};
}

ffi::Error Execute(cuda::Stream stream, std::int32_t device, Executable* executable, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  DeviceBuffer arguments[kMaxBuffers];
  DeviceBuffer results[kMaxBuffers];
  if (Status status = Collect(args, "arguments", arguments); !status.ok()) return ToXla(std::move(status));
  if (Status status = Collect(rets, "results", results); !status.ok()) return ToXla(std::move(status));
  return ToXla(executable->program->Launch({arguments, args.size(), results, rets.size()}, device, stream));
}

// The CPU platform has no stream: the driver is then a stand-in that records.
ffi::Error ExecuteOnHost(std::int32_t device, Executable* executable, ffi::RemainingArgs args,
                         ffi::RemainingRets rets) {
  return Execute(nullptr, device, executable, args, rets);
}

constexpr auto kTypeInfo = ffi::MakeTypeInfo<Executable>();

auto ExecuteBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cuda::Stream>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::State<Executable>>()
      .RemainingArgs()
      .RemainingRets();
}

// 0 and an empty text, or 1 and the reason.
int Report(const Status& status, char* error, std::size_t error_size) {
  if (error_size > 0) {
    std::size_t count = std::min(status.message.size(), error_size - 1);
    std::memcpy(error, status.message.data(), count);
    error[count] = '\0';
  }
  return status.ok() ? 0 : 1;
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxmoe_instantiate, Instantiate,
                              ffi::Ffi::BindInstantiate().Attr<ffi::Span<const std::uint8_t>>("spec"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxmoe_initialize, Initialize,
                              ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::State<Executable>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxmoe_execute, Execute, ExecuteBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxmoe_execute_in_graph, Execute, ExecuteBinding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxmoe_execute_on_host, ExecuteOnHost,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<Executable>>()
                                  .RemainingArgs()
                                  .RemainingRets());

extern "C" {

XLA_FFI_TypeId* jaxmoe_state_type_id() { return &Executable::id; }
const XLA_FFI_TypeInfo* jaxmoe_state_type_info() { return &kTypeInfo; }

void jaxmoe_set_cubin_directory(const char* directory) { SetCubinDirectory(directory); }

void jaxmoe_set_peer(std::uint32_t context, std::int32_t device, std::uint64_t base, std::uint64_t workspace,
                     std::uint64_t window, std::int32_t rank) {
  SetPeer(context, device, {base, workspace, window, rank});
}
int jaxmoe_erase_peer(std::uint32_t context) { return ErasePeer(context) ? 1 : 0; }

// Opens the driver now, so that what JAXMOE_LIBCUDA says at this moment holds.
int jaxmoe_load_driver(char* error, std::size_t error_size) {
  const cuda::Driver* driver = nullptr;
  return Report(cuda::Driver::Load(&driver), error, error_size);
}

int jaxmoe_program_create(const unsigned char* spec, std::size_t size, Program** program, char* error,
                          std::size_t error_size) {
  std::unique_ptr<Program> fresh;
  Status status = Program::Create(spec, size, &fresh);
  *program = fresh.release();
  return Report(status, error, error_size);
}

int jaxmoe_program_prepare(const Program* program, std::int32_t device, char* error, std::size_t error_size) {
  return Report(program->Prepare(device), error, error_size);
}

int jaxmoe_program_launch(const Program* program, const DeviceBuffer* arguments, std::size_t argument_count,
                          const DeviceBuffer* results, std::size_t result_count, std::int32_t device, void* stream,
                          char* error, std::size_t error_size) {
  CallBuffers buffers{arguments, argument_count, results, result_count};
  return Report(program->Launch(buffers, device, static_cast<cuda::Stream>(stream)), error, error_size);
}

void jaxmoe_program_destroy(Program* program) { delete program; }

}  // extern "C"

}  // namespace jaxmoe

#include "ffi/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>

namespace jaxmoe::cuda {
namespace {

template <typename F>
bool Find(void* library, const char* name, F** function, std::string* missing) {
  *function = reinterpret_cast<F*>(dlsym(library, name));
  if (*function == nullptr) *missing = name;
  return *function != nullptr;
}

// The symbols carry the version suffix of the signature declared in the header.
bool FindAll(void* lib, Driver* d, std::string* missing) {
  return Find(lib, "cuInit", &d->Init, missing) && Find(lib, "cuGetErrorName", &d->GetErrorName, missing) &&
         Find(lib, "cuGetErrorString", &d->GetErrorString, missing) &&
         Find(lib, "cuDeviceGet", &d->DeviceGet, missing) &&
         Find(lib, "cuDevicePrimaryCtxRetain", &d->PrimaryContextRetain, missing) &&
         Find(lib, "cuCtxPushCurrent_v2", &d->ContextPush, missing) &&
         Find(lib, "cuCtxPopCurrent_v2", &d->ContextPop, missing) &&
         Find(lib, "cuLibraryLoadData", &d->LibraryLoadData, missing) &&
         Find(lib, "cuLibraryUnload", &d->LibraryUnload, missing) &&
         Find(lib, "cuLibraryGetKernelCount", &d->LibraryGetKernelCount, missing) &&
         Find(lib, "cuLibraryEnumerateKernels", &d->LibraryEnumerateKernels, missing) &&
         Find(lib, "cuKernelSetAttribute", &d->KernelSetAttribute, missing) &&
         Find(lib, "cuKernelGetFunction", &d->KernelGetFunction, missing) &&
         Find(lib, "cuKernelGetParamInfo", &d->KernelGetParamInfo, missing) &&
         Find(lib, "cuTensorMapEncodeTiled", &d->TensorMapEncodeTiled, missing) &&
         Find(lib, "cuLaunchKernelEx", &d->LaunchKernelEx, missing);
}

Status Open(Driver* driver) {
  const char* override_path = std::getenv("JAXMOE_LIBCUDA");
  const char* path = override_path != nullptr && *override_path != '\0' ? override_path : "libcuda.so.1";
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    return Unavailable(std::string("the CUDA driver cannot be opened: ") + (reason != nullptr ? reason : path) +
                       ". Run on a machine with an NVIDIA driver, or name the library in JAXMOE_LIBCUDA");
  }
  std::string missing;
  if (!FindAll(library, driver, &missing)) {
    dlclose(library);
    return Unavailable("the CUDA driver '" + std::string(path) + "' has no function " + missing +
                       "; CUDA 12.4 (driver 550) or newer is needed");
  }
  if (Result result = driver->Init(0); result != 0) {
    Status status = Unavailable(driver->Describe("cuInit", result));
    dlclose(library);
    return status;
  }
  return {};
}

}  // namespace

Status Driver::Load(const Driver** driver) {
  static std::mutex mutex;
  static Driver loaded;
  static bool done = false;
  std::lock_guard<std::mutex> lock(mutex);
  if (!done) {
    Driver fresh{};
    if (Status status = Open(&fresh); !status.ok()) return status;
    loaded = fresh;
    done = true;
  }
  *driver = &loaded;
  return {};
}

std::string Driver::Describe(const char* call, Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (GetErrorName(result, &name) != 0 || name == nullptr) name = "unknown CUDA error";
  if (GetErrorString(result, &text) != 0 || text == nullptr) text = "no description";
  return std::string(call) + " failed: " + name + " (" + text + ", code " + std::to_string(result) + ")";
}

}  // namespace jaxmoe::cuda

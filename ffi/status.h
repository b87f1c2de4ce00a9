// The result of an operation that can fail, independent of XLA and of CUDA.
#ifndef JAXMOE_FFI_STATUS_H_
#define JAXMOE_FFI_STATUS_H_

#include <string>
#include <utility>

namespace jaxmoe {

enum class Code { kOk, kInvalidArgument, kNotFound, kUnavailable, kInternal };

struct [[nodiscard]] Status {
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }
};

inline Status InvalidArgument(std::string message) { return {Code::kInvalidArgument, std::move(message)}; }
inline Status NotFound(std::string message) { return {Code::kNotFound, std::move(message)}; }
inline Status Unavailable(std::string message) { return {Code::kUnavailable, std::move(message)}; }
inline Status Internal(std::string message) { return {Code::kInternal, std::move(message)}; }

}  // namespace jaxmoe

#endif  // JAXMOE_FFI_STATUS_H_

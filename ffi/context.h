// Peer contexts: addresses and ranks of expert-parallel buffers, known only at run time and different on each device.
// Whoever allocates the buffers sets them before the first launch; a launch looks them up by context id and device.
#ifndef JAXMOE_FFI_CONTEXT_H_
#define JAXMOE_FFI_CONTEXT_H_

#include <cstddef>
#include <cstdint>

#include "ffi/status.h"

namespace jaxmoe {

enum class PeerField : std::uint8_t { kBase, kWorkspace, kWindow, kRank };
inline constexpr std::uint8_t kPeerFields = 4;

// Bytes of the field as a kernel parameter: a rank is an int32, the others are device addresses.
constexpr std::size_t PeerFieldBytes(PeerField field) { return field == PeerField::kRank ? 4 : 8; }

struct Peer {
  std::uint64_t base = 0;
  std::uint64_t workspace = 0;
  std::uint64_t window = 0;
  std::int32_t rank = 0;
};

// Sets or replaces what `context` is on `device`. Thread-safe, as everything here.
void SetPeer(std::uint32_t context, int device, const Peer& peer);

// Forgets `context` on every device; says whether it was known.
bool ErasePeer(std::uint32_t context);

// Writes the value of `field` to `*value` (a rank in the low 4 bytes).
Status ResolvePeer(std::uint32_t context, int device, PeerField field, std::uint64_t* value);

}  // namespace jaxmoe

#endif  // JAXMOE_FFI_CONTEXT_H_

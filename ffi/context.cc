#include "ffi/context.h"

#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

namespace jaxmoe {
namespace {

struct Registry {
  std::shared_mutex mutex;
  std::map<std::pair<std::uint32_t, int>, Peer> peers;
};

Registry& TheRegistry() {
  static Registry* registry = new Registry;  // outlives every thread that may still launch at exit
  return *registry;
}

}  // namespace

void SetPeer(std::uint32_t context, int device, const Peer& peer) {
  Registry& registry = TheRegistry();
  std::unique_lock lock(registry.mutex);
  registry.peers[{context, device}] = peer;
}

bool ErasePeer(std::uint32_t context) {
  Registry& registry = TheRegistry();
  std::unique_lock lock(registry.mutex);
  auto first = registry.peers.lower_bound({context, INT32_MIN});
  auto last = registry.peers.upper_bound({context, INT32_MAX});
  bool known = first != last;
  registry.peers.erase(first, last);
  return known;
}

Status ResolvePeer(std::uint32_t context, int device, PeerField field, std::uint64_t* value) {
  Registry& registry = TheRegistry();
  std::shared_lock lock(registry.mutex);
  auto found = registry.peers.find({context, device});
  if (found == registry.peers.end()) {
    return NotFound("peer context " + std::to_string(context) + " is not set up on device " + std::to_string(device) +
                    "; create the EpContext in this process, with this device in it, before the first call");
  }
  switch (field) {
    case PeerField::kBase:
      *value = found->second.base;
      break;
    case PeerField::kWorkspace:
      *value = found->second.workspace;
      break;
    case PeerField::kWindow:
      *value = found->second.window;
      break;
    case PeerField::kRank:
      *value = static_cast<std::uint32_t>(found->second.rank);
      break;
  }
  return {};
}

}  // namespace jaxmoe

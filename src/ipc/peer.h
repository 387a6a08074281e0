#pragma once

#include <span>
#include <string>

#include <sys/types.h>

#include "src/base/result.h"
#include "src/base/unique_fd.h"

namespace rekindle::ipc {

// The process at the other end of a unix socket, as the kernel reports it.
struct Peer {
  // 0: the process is in a pid namespace that this one does not see.
  pid_t pid = 0;
  uid_t uid = 0;
  // Of exactly that process. Empty: it is gone, or the kernel has no pidfds.
  UniqueFd pidfd;
};

// kInternal: `socket_fd` is not a connected unix socket.
Result<Peer> peer_of(int socket_fd);
// kDenied unless the peer runs as our uid or one of `also_allowed`; `what` names the socket.
Result<void> check_peer(const Peer& peer, std::span<const uid_t> also_allowed,
                        const std::string& what);

}  // namespace rekindle::ipc

#pragma once

#include <span>
#include <string>

#include <sys/types.h>

#include "src/base/result.h"
#include "src/base/unique_fd.h"

namespace rekindle::ipc {

// Who is at the other end of a unix socket, as the kernel says it.
struct Peer {
  pid_t pid = 0;  // 0: it lives in a pid namespace that we do not see
  uid_t uid = 0;
  UniqueFd pidfd;  // of exactly that process; empty when it has gone, or the kernel has none
};

// kInternal when `socket_fd` is no connected unix socket.
Result<Peer> peer_of(int socket_fd);
// kDenied unless the peer runs as our uid or one of `also_allowed`; `what` names the socket.
Result<void> check_peer(const Peer& peer, std::span<const uid_t> also_allowed,
                        const std::string& what);

}  // namespace rekindle::ipc

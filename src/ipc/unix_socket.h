#pragma once

#include <span>
#include <string>

#include <sys/types.h>
#include <sys/un.h>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"

// Unix sockets that other users can neither open nor replace: mode 0600, in a directory of our own
// of mode 0700. A socket may be opened to other users: they can then pass through its directory,
// but neither read nor write it.
namespace rekindle::ipc {

// kInvalid: the path is empty or too long.
Result<sockaddr_un> unix_address(const std::string& path);
// Binds and listens; non-blocking, mode 0600. Replaces a dead socket file. kUnavailable: a process
// answers on it. The caller prevents two starts at the same time.
Result<UniqueFd> listen_unix_socket(const std::string& path);
// Lets other users pass through our directories and connect to the socket in the last one. The
// caller checks each peer that it accepts. close_to_others() undoes this for the directories.
Result<void> open_to_others(const std::string& socket_path,
                            std::span<const std::string> directories);
Result<void> close_to_others(std::span<const std::string> directories);
// Checks the directory and the socket file before a connect: both belong to our uid or one of
// `also_allowed`, and others can neither read nor write them. kDenied; kNotFound: there is no
// socket.
Result<void> check_unix_path(const std::string& path, std::span<const uid_t> also_allowed = {});
// Returns a connected, non-blocking socket. kUnavailable: nobody listens. kTimeout: the listener
// does not accept.
Result<UniqueFd> connect_unix_socket(const std::string& path, TimePoint deadline);

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

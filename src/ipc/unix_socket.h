#pragma once

#include <span>
#include <string>

#include <sys/types.h>
#include <sys/un.h>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"

// Unix sockets that other users can neither open nor replace: mode 0600 in a directory of mode 0700
// that is ours; who is at the other end says peer.h. One socket may be opened to others: the
// directory can then be passed through, but neither read nor written by them.
namespace rekindle::ipc {

Result<sockaddr_un> unix_address(const std::string& path);  // kInvalid: empty or too long
// Binds and listens; non-blocking, mode 0600. A dead socket file is replaced; kUnavailable when
// something answers on it. Two starts at the same instant are for the caller to exclude.
Result<UniqueFd> listen_unix_socket(const std::string& path);
// Lets others pass through the directories, which are ours, and connect to the socket in the last
// of them; whoever accepts checks who they are. close_to_others() undoes it for the directories.
Result<void> open_to_others(const std::string& socket_path,
                            std::span<const std::string> directories);
Result<void> close_to_others(std::span<const std::string> directories);
// The directory and the socket file, before a caller connects: owned by our uid or one of
// `also_allowed`, neither readable nor writable by others. kDenied; kNotFound when there is none.
Result<void> check_unix_path(const std::string& path, std::span<const uid_t> also_allowed = {});
// A connected, non-blocking socket. kUnavailable: nobody listens; kTimeout: it does not accept.
Result<UniqueFd> connect_unix_socket(const std::string& path, TimePoint deadline);

}  // namespace rekindle::ipc

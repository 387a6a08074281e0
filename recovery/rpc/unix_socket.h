#pragma once

#include <cstdint>
#include <string>

#include <sys/types.h>

#include "recovery/rpc/address.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"

// Unix sockets that other users can neither open nor replace: a directory of mode 0700 that is
// ours, and the uid of the other end checked on both sides.
namespace rekindle::rpc {

Result<Endpoint> unix_endpoint(const std::string& path);  // kInvalid: too long
// Binds and listens. A dead socket file is replaced; kUnavailable when something answers on it.
// Two starts at the same instant are for the caller to exclude (the store's lock does).
Result<UniqueFd> listen_unix_socket(const std::string& path);
// The directory and the socket file, before a caller connects.
Result<void> check_unix_path(const std::string& path);
// SO_PEERCRED: kDenied unless the other end runs as our uid.
Result<void> check_peer_uid(int socket_fd, const std::string& path);

}  // namespace rekindle::rpc

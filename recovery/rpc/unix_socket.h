#pragma once

#include <string>

#include "recovery/rpc/address.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"

// The unix sockets of src/ipc, for Asio.
namespace rekindle::rpc {

Result<Endpoint> unix_endpoint(const std::string& path);  // kInvalid: too long
// As in src/ipc/unix_socket.h.
Result<UniqueFd> listen_unix_socket(const std::string& path);
Result<void> check_unix_path(const std::string& path);
// SO_PEERCRED: kDenied unless the other end runs as our uid.
Result<void> check_peer_uid(int socket_fd, const std::string& path);

}  // namespace rekindle::rpc

#include "recovery/rpc/unix_socket.h"

#include <boost/asio/local/stream_protocol.hpp>

#include "src/ipc/peer.h"
#include "src/ipc/unix_socket.h"

namespace rekindle::rpc {

Result<Endpoint> unix_endpoint(const std::string& path) {
  TRY_VOID(ipc::unix_address(path));
  return Endpoint(boost::asio::local::stream_protocol::endpoint(path));
}

Result<UniqueFd> listen_unix_socket(const std::string& path) {
  return ipc::listen_unix_socket(path);
}

Result<void> check_unix_path(const std::string& path) { return ipc::check_unix_path(path); }

Result<void> check_peer_uid(int socket_fd, const std::string& path) {
  TRY(const ipc::Peer peer, ipc::peer_of(socket_fd));
  return ipc::check_peer(peer, {}, "unix socket " + path);
}

}  // namespace rekindle::rpc

#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "recovery/rpc/connection.h"

namespace rekindle::rpc {

// Small frames go out at once; the kernel notices a peer that vanished without a word in ~25 s
// (heartbeats and call deadlines notice sooner where someone waits).
inline void set_tcp_options(Socket& socket) {
  const auto set = [&](int level, int option, int value) {
    (void)::setsockopt(socket.native_handle(), level, option, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
}

}  // namespace rekindle::rpc

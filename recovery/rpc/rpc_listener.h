#pragma once

#include <functional>
#include <memory>
#include <string>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>

#include "recovery/rpc/address.h"
#include "recovery/rpc/rpc_connection.h"
#include "src/base/unique_fd.h"

namespace rekindle::rpc {

// Accepts connections on one TCP address or unix socket. Without free descriptors it uses a spare
// one to take the waiting connection and close it, so that the caller sees an end instead of a
// hang; then it pauses. Runs on the executor's one thread; handlers hold a reference until close().
class Listener : public std::enable_shared_from_this<Listener> {
 public:
  using OnAccept = std::function<void(Socket socket, std::string peer_address)>;

  // A bound, listening, non-blocking socket. unix_path: removed by close(); "" for TCP.
  Listener(const boost::asio::any_io_executor& executor, UniqueFd fd, std::string unix_path,
           OnAccept on_accept, std::function<void()> on_exhausted);
  ~Listener();

  void start();
  void close();
  const std::string& unix_path() const { return unix_path_; }

 private:
  void wait();
  void accept_some();
  void shed(int error_number);
  void pause();

  boost::asio::posix::stream_descriptor descriptor_;
  boost::asio::steady_timer pause_;
  UniqueFd spare_;
  std::string unix_path_;
  OnAccept on_accept_;
  // Called when descriptors ran out, to close idle connections.
  std::function<void()> on_exhausted_;
  bool closed_ = false;
  bool shedding_ = false;
};

// Binds and listens; `bound` receives the address in use.
Result<UniqueFd> listen_tcp(const std::string& address, std::string& bound);

}  // namespace rekindle::rpc

#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>

#include "recovery/rpc/rpc.h"
#include "src/ipc/channel.h"

namespace rekindle::device {

// The agent's end of the device process' socket: frames in, frames out, never waiting for it.
// Always in a shared_ptr; control thread only.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  using OnFrame = std::function<Result<void>(const std::string& body)>;

  Connection(const boost::asio::any_io_executor& executor, ipc::Channel channel)
      : descriptor_(executor), channel_(std::move(channel)) {}
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Reads until the connection ends or close(); then says why.
  async::Task<Error> run(OnFrame on_frame);
  // An error: it cannot be sent from here (no descriptors, no memory); the connection goes on.
  Result<void> send(std::string body, std::vector<UniqueFd> descriptors = {});
  void close(Error why);
  void check(TimePoint now);  // a frame that has begun and does not end: closes

 private:
  Result<bool> read_some(const OnFrame& on_frame);
  void flush();

  boost::asio::posix::stream_descriptor descriptor_;  // the channel's, borrowed
  ipc::Channel channel_;
  bool writing_ = false;
  bool closed_ = false;
  Error why_{ErrorCode::kPeerLost, "closed its socket"};
};

}  // namespace rekindle::device

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "proto/worker.pb.h"
#include "src/async/task.h"
#include "src/ipc/framed_socket.h"
#include "src/ipc/unix_socket.h"

namespace rekindle::worker {

using ClientId = std::uint64_t;

// One worker's connection. It never waits for the worker: one that does not read is cut off. Always
// in a shared_ptr; control thread only.
class Client : public std::enable_shared_from_this<Client> {
 public:
  using OnFrame = std::function<void(proto::WorkerFrame frame, std::vector<UniqueFd> descriptors)>;

  Client(const boost::asio::any_io_executor& executor, ClientId id, ipc::Channel channel,
         ipc::Peer peer);

  // Reads until the connection ends or close() is called, and returns the reason.
  async::Task<Error> run(OnFrame on_frame);
  void send(const proto::AgentFrame& frame, std::vector<UniqueFd> descriptors = {});
  void send_encoded(std::string frame, std::vector<UniqueFd> descriptors);
  void close(Error why) { socket_->close(std::move(why)); }
  // Closes when a frame was begun and did not end in time, or when the worker has been silent for
  // `silence`.
  void check(TimePoint now, std::chrono::milliseconds silence);
  // This process did not run for so long: the messages of that time are still unread.
  void excuse(Duration pause) { socket_->excuse(pause); }

  ClientId id() const { return id_; }
  std::uint32_t pid() const { return pid_; }
  ipc::Peer& peer() { return peer_; }
  bool closed() const { return socket_->closed(); }

  // The worker's hello was accepted.
  bool greeted = false;

 private:
  const ClientId id_;
  ipc::Peer peer_;
  const std::uint32_t pid_;
  const std::shared_ptr<ipc::FramedSocket> socket_;
};

}  // namespace rekindle::worker

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>

#include "proto/worker.pb.h"
#include "recovery/rpc/rpc.h"
#include "src/ipc/channel.h"
#include "src/ipc/peer.h"

namespace rekindle::worker {

using ClientId = std::uint64_t;

// One worker's connection: frames in, frames out. Never waits for the worker: one that does not
// read is cut off. Always in a shared_ptr; control thread only.
class Client : public std::enable_shared_from_this<Client> {
 public:
  using OnFrame = std::function<void(proto::WorkerFrame frame, std::vector<UniqueFd> descriptors)>;

  Client(const boost::asio::any_io_executor& executor, ClientId id, ipc::Channel channel,
         ipc::Peer peer);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Reads until the connection ends or close(); then says why. Frames come one by one.
  async::Task<Error> run(OnFrame on_frame);
  void send(const proto::AgentFrame& frame, std::vector<UniqueFd> descriptors = {});
  void send_encoded(std::string frame, std::vector<UniqueFd> descriptors);
  void close(Error why);
  // Frames that have begun and do not end, and silence: closes when one has.
  void check(TimePoint now, std::chrono::milliseconds silence);
  // This process did not run for so long: what was sent meanwhile is still to be read.
  void excuse(Duration pause) { last_heard_ += pause; }

  ClientId id() const { return id_; }
  std::uint32_t pid() const { return pid_; }
  ipc::Peer& peer() { return peer_; }
  bool closed() const { return closed_; }
  bool greeted = false;          // its hello was accepted
  std::size_t sessions = 0;      // of it
  std::size_t calls = 0;         // under way
  std::size_t publications = 0;  // begun and not over
  bool dead = false;             // the watch has seen it die

 private:
  Result<bool> read_some(const OnFrame& on_frame);
  void flush();

  boost::asio::posix::stream_descriptor descriptor_;  // the channel's, borrowed
  const ClientId id_;
  ipc::Channel channel_;
  ipc::Peer peer_;
  const std::uint32_t pid_;
  TimePoint last_heard_;
  bool writing_ = false;
  bool closed_ = false;
  Error why_{ErrorCode::kPeerLost, "closed its connection (it exited, or was killed)"};
};

}  // namespace rekindle::worker

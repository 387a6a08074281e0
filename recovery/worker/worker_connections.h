#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include <boost/asio/any_io_executor.hpp>

#include "proto/worker.pb.h"
#include "recovery/rpc/rpc_listener.h"
#include "src/async/task.h"
#include "src/async/task_group.h"
#include "src/base/ids.h"
#include "src/base/unique_fd.h"
#include "src/ipc/framed_socket.h"
#include "src/ipc/life.h"
#include "src/ipc/unix_socket.h"

namespace rekindle::worker {

using ClientId = std::uint64_t;
// The descriptors of one message of a worker.
inline constexpr std::size_t kMostResidentBlocks = 64;

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
  // This process did not run for `pause`. The messages of that time are still unread.
  void excuse(Duration pause) { socket_->excuse(pause); }

  ClientId id() const { return id_; }
  std::uint32_t pid() const { return pid_; }
  uid_t uid() const { return uid_; }
  ipc::Peer& peer() { return peer_; }
  bool closed() const { return socket_->closed(); }

  // SIGKILL, to exactly that process. kUnavailable: this kernel has no pidfds.
  Result<void> kill() const;
  // A further pidfd of the worker. kUnavailable: this kernel has none, or the worker is in another
  // PID namespace.
  Result<UniqueFd> pidfd() const;

  // The worker's hello was accepted.
  bool greeted = false;
  // Equal for all connections of one process, and for no two processes. Set by the hello.
  std::string process;

 private:
  const ClientId id_;
  ipc::Peer peer_;
  const std::uint32_t pid_;
  const uid_t uid_;
  // The watch of the worker's life takes the one of `peer_`.
  const UniqueFd pidfd_;
  const std::shared_ptr<ipc::FramedSocket> socket_;
};

using ClientPtr = std::shared_ptr<Client>;

// The end of a worker's connection.
struct Departure {
  Error why;
  bool died = false;               // its process was seen to die
  std::optional<Duration> unseen;  // from its last sign of life until the end was seen
};

class ConnectionEvents {
 public:
  virtual ~ConnectionEvents() = default;
  // A worker has connected: check() has to be called from now on.
  virtual void on_arrival() = 0;
  // A call of a worker that has said hello.
  virtual void on_call(const ClientPtr& client, proto::WorkerFrame frame,
                       std::vector<UniqueFd> descriptors) = 0;
  virtual void on_departure(const ClientPtr& client, const Departure& departure) = 0;
};

struct ConnectionOptions {
  std::filesystem::path directory;  // where worker.sock is made
  Incarnation incarnation;
  std::vector<uid_t> allowed_uids;  // beside our own; they may then pass through `directory`
  bool keeps_residents = false;
  std::chrono::milliseconds ping_interval{1000};
  std::chrono::milliseconds silence{10'000};
};

// The workers' connections: lets them in, greets them, and watches them for death and silence. One
// that hangs, floods or dies disturbs no other. Control thread only.
class WorkerConnections {
 public:
  // `events` and `tasks` outlive this.
  static Result<std::unique_ptr<WorkerConnections>> listen(boost::asio::any_io_executor executor,
                                                           ConnectionOptions options,
                                                           ConnectionEvents& events,
                                                           async::TaskGroup& tasks);
  ~WorkerConnections();
  WorkerConnections(const WorkerConnections&) = delete;
  WorkerConnections& operator=(const WorkerConnections&) = delete;

  // Lets nobody in any more, and ends all connections.
  void close();
  bool any() const { return !clients_.empty(); }
  // Whether this process is connected.
  bool has(pid_t pid) const;
  // Closes connections that are silent, or whose frame does not end.
  void check(TimePoint now);
  // This process did not run for so long.
  void excuse(Duration pause);

 private:
  WorkerConnections(boost::asio::any_io_executor executor, ConnectionOptions options,
                    ConnectionEvents& events, async::TaskGroup& tasks);
  Result<void> start();
  void accept(rpc::Socket socket);
  async::Task<void> serve(ClientPtr client);
  void on_frame(const ClientPtr& client, proto::WorkerFrame frame,
                std::vector<UniqueFd> descriptors);
  Result<void> greet(const ClientPtr& client, const proto::WorkerFrame& frame);
  void on_death(const ipc::Death& death);
  void drop(const ClientPtr& client, const Departure& departure);

  const boost::asio::any_io_executor executor_;
  const ConnectionOptions options_;
  ConnectionEvents& events_;
  async::TaskGroup& tasks_;
  std::map<ClientId, ClientPtr> clients_;
  ClientId last_client_ = 0;  // numbers are never used again
  bool closing_ = false;
  std::shared_ptr<rpc::Listener> listener_;
  std::unique_ptr<ipc::LifeWatch> watch_;  // last: its thread posts to this object
};

}  // namespace rekindle::worker

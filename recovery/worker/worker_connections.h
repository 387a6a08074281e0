#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include <sys/types.h>

#include <boost/asio/any_io_executor.hpp>

#include "proto/worker.pb.h"
#include "recovery/rpc/rpc_listener.h"
#include "recovery/worker/worker_client.h"
#include "src/async/task_group.h"
#include "src/base/ids.h"
#include "src/ipc/life.h"

namespace rekindle::worker {

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
  virtual void on_call(const ClientPtr& client, const proto::WorkerFrame& frame) = 0;
  virtual void on_departure(const ClientPtr& client, const Departure& departure) = 0;
};

struct ConnectionOptions {
  std::filesystem::path directory;  // where worker.sock is made
  Incarnation incarnation;
  std::vector<uid_t> allowed_uids;  // beside our own; they may then pass through `directory`
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
  void on_frame(const ClientPtr& client, const proto::WorkerFrame& frame);
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

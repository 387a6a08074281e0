#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <latch>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "transport/tcp/tcp_server_stream.h"
#include "transport/tcp/tcp_socket.h"

namespace rekindle::transport::tcp {

// One server thread: an edge-triggered epoll set of connections, and the turns they take. The first
// loop also listens and deals out new connections. A connection belongs to its thread alone. Other
// threads reach the loop through the inbox.
class ServerLoop {
 public:
  using Dealer = std::function<void(UniqueFd)>;

  // At most this many of its connections may lack their hello. Beyond that the oldest one is
  // closed.
  ServerLoop(ServerContext& context, std::size_t max_pending_hellos)
      : context_(context), max_pending_hellos_(max_pending_hellos) {}
  ~ServerLoop() { stop(); }
  ServerLoop(const ServerLoop&) = delete;
  ServerLoop& operator=(const ServerLoop&) = delete;

  // Starts the thread. With a listener, `deal` gets each accepted socket (on this thread).
  Result<void> start(int index, Listener* listener, Dealer deal);
  void stop();  // closes every connection, joins; idempotent

  // Any thread.
  void adopt(UniqueFd socket);
  void drop_session(const SessionToken& token, std::latch& done);

 private:
  using Id = std::uint64_t;
  struct Entry {
    std::unique_ptr<ServerStream> connection;
    bool queued = false;  // in ready_
  };

  void run();
  void wait_for_events();
  int wait_ms(TimePoint now) const;
  void handle_event(Id id, std::uint32_t events);
  void take_inbox();
  void add(UniqueFd socket);
  void accept_new();
  void pause_accepting(bool pause);
  void give_turns();
  void make_ready(Id id);
  void wake_throttled(TimePoint now);
  void check_registry();
  void check_deadlines(TimePoint now);
  void evict_oldest_pending();
  void close(Id id, bool shed);
  void wake();

  ServerContext& context_;
  const std::size_t max_pending_hellos_;
  Listener* listener_ = nullptr;
  Dealer deal_;
  UniqueFd epoll_;
  UniqueFd wake_fd_;
  std::thread thread_;

  std::mutex mutex_;
  std::vector<UniqueFd> adopted_;                            // guarded by mutex_
  std::vector<std::pair<SessionToken, std::latch*>> drops_;  // guarded by mutex_
  bool stopping_ = false;                                    // guarded by mutex_

  // Used by the thread alone.
  std::unordered_map<Id, Entry> connections_;
  // Smaller ids are those of the listener and the wake-up.
  Id next_id_ = 16;
  std::vector<Id> ready_;
  // Connections without a hello, oldest first. Some of them may be closed.
  std::deque<Id> pending_;
  std::size_t pending_count_ = 0;
  std::vector<std::pair<TimePoint, Id>> throttled_;
  std::optional<TimePoint> accept_again_at_;
  TimePoint next_check_{};
  std::uint64_t seen_changes_ = 0;
  bool stop_ = false;
};

}  // namespace rekindle::transport::tcp

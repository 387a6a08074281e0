#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "src/base/result.h"
#include "transport/read_op.h"
#include "transport/verbs/device/fabric.h"

namespace rekindle::transport::verbs {

// The facts about a queue pair that one end tells the other.
struct QueuePairEnd {
  std::uint32_t number = 0;
  // The number of the first packet that this end sends.
  std::uint32_t packet_number = 0;
};

struct ConnectionOptions {
  std::size_t queue_pairs = 2;
  std::uint32_t send_depth = 128;  // per queue pair
  std::uint32_t recv_depth = 0;
  std::uint32_t max_sge = 1;
  std::uint32_t inline_bytes = 0;
  // The protection domain of the queue pairs: they reach its memory only. null: the device's.
  ibv_pd* domain = nullptr;
};

// The other end, and the values that both agreed on.
struct RemoteEnd {
  RailAddress address;
  std::uint32_t mtu_bytes = 1024;
  // READs open at once, per queue pair.
  std::uint8_t rd_atomic = 1;
  // At most as many as this end has. Those of this end without a partner are destroyed.
  std::vector<QueuePairEnd> queue_pairs;
};
enum class ConnectionRole { kReads, kServes };

// The RC queue pairs between two rails for one session. Their CQ has room for a completion of
// everything that can be outstanding, so it cannot overrun. A connection is made, connected and
// destroyed off the data path. One thread at a time uses it.
class Connection {
 public:
  // Queue pairs in INIT. kUnavailable: the rail is down; kExhausted: the device has no more.
  static Result<std::unique_ptr<Connection>> create(Rail& rail, const ConnectionOptions& options);
  // Destroying queue pairs ends every access by them.
  ~Connection() = default;

  Rail& rail() const { return rail_; }
  std::uint32_t epoch() const { return epoch_; }  // of the rail when this was made
  bool rail_moved() const { return rail_.epoch() != epoch_; }
  std::string why_moved() const;  // also when the rail is up again
  std::uint32_t mtu_bytes() const { return mtu_bytes_; }
  std::vector<QueuePairEnd> ends() const;
  std::uint32_t send_depth() const { return options_.send_depth; }
  std::uint32_t max_sge() const { return options_.max_sge; }
  std::size_t queue_pair_count() const { return queue_pairs_.size(); }

  Result<void> connect(const RemoteEnd& remote, ConnectionRole role);  // INIT to RTS
  // Moves all queue pairs to ERR, which flushes all outstanding requests. Idempotent.
  void stop();
  // Ends every access at once; nothing more completes.
  void destroy_queue_pairs() { queue_pairs_.clear(); }
  // Destroys all objects of the device. Only rail() and rail_moved() may be used after it.
  void close();

  ibv_qp* queue_pair(std::size_t index) const { return queue_pairs_[index].qp.get(); }
  Api& api() const { return rail_.device().api(); }
  ibv_cq* cq() const { return cq_.get(); }
  int event_fd() const { return channel_->fd; }
  // Asks for one event on event_fd() at the next completion.
  void arm() { (void)api().req_notify_cq(cq_.get(), 0); }
  // Takes an event, if one has come.
  bool take_event();

 private:
  struct QueuePair {
    QpHandle qp;
    QueuePairEnd end;
  };
  Connection(Rail& rail, const ConnectionOptions& options) : rail_(rail), options_(options) {}
  Result<void> make();
  Result<void> make_queue_pair();
  Result<void> to_ready_to_receive(QueuePair& pair, const RemoteEnd& remote, QueuePairEnd peer,
                                   ConnectionRole role) const;
  Result<void> to_ready_to_send(QueuePair& pair, const RemoteEnd& remote,
                                ConnectionRole role) const;

  Rail& rail_;
  ConnectionOptions options_;
  std::uint32_t epoch_ = 0;
  std::uint32_t mtu_bytes_ = 0;
  std::uint8_t gid_index_ = 0;
  ChannelHandle channel_;
  CqHandle cq_;
  std::vector<QueuePair> queue_pairs_;
};

// The value of the enumeration for 256 … 4096 bytes, or for the next smaller size.
ibv_mtu to_ibv_mtu(std::uint32_t bytes);
// The status of an op whose READ ended like this.
OpStatus to_op_status(ibv_wc_status status);
// A text for logs.
std::string explain(ibv_wc_status status);

using StartThread = std::function<std::future<void>(std::function<void()>)>;
std::future<void> start_thread(std::function<void()> work);

// Runs body(0) … body(count - 1) in parallel and waits for all. The caller's thread runs the last
// one, and all that no thread could be started for (std::system_error), one by one.
void run_together(std::size_t count, const std::function<void(std::size_t)>& body,
                  const StartThread& start = start_thread);

}  // namespace rekindle::transport::verbs

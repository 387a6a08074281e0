#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>

#include <boost/asio/any_io_executor.hpp>

#include "proto/coordinator.pb.h"
#include "recovery/coordinator/coordinator_service.h"
#include "recovery/coordinator/core/core.h"
#include "recovery/coordinator/core/rounds.h"
#include "src/async/task.h"

namespace rekindle::coordinator {

// Logs the news of the rounds since the last look.
class RoundLog {
 public:
  void look(const Rounds& rounds);

 private:
  struct Said {
    std::size_t parties = 0;
    std::set<std::uint32_t> stopped;
    bool over = false;
  };
  static void look(const Round& round, Said& said);

  std::map<RoundId, Said> said_;
};

// Leaves the spans of each round that has ended: the round, its phases, and each rank with its own
// phases. Those of ranks that do not report when they began stand one after the other.
class RoundTraces {
 public:
  // nullptr: no spans.
  explicit RoundTraces(trace::Tracer* tracer) : tracer_(tracer) {}
  // The round belongs to this span.
  void begin(RoundId round, const trace::Context& parent) { parents_[round] = parent; }
  void look(const Rounds& rounds, TimePoint now);

 private:
  struct Extent {
    TimePoint began{};
    TimePoint ended{};
  };
  void record(const Round& round, TimePoint now);
  void record_rank(const trace::Context& update, const RoundPlace& place, const Extent& round,
                   TimePoint now);

  trace::Tracer* const tracer_;
  std::map<RoundId, trace::Context> parents_;
  std::set<RoundId> recorded_;
};

// The calls of broadcast rounds, served from a Core. Each waits for a change, at most as long as
// its caller wants and 5 s. On the executor's one thread; must outlive the server's close().
class RoundService {
 public:
  RoundService(boost::asio::any_io_executor executor, Core& core,
               std::function<Result<void>()> may_answer, trace::Tracer* tracer = nullptr,
               const AccessControl* access = nullptr);
  void attach(rpc::RpcServer& server);
  // Time has passed in the core: calls that wait for a change of the rounds look again.
  void wake_waiters();

 private:
  async::Task<void> await_members(Duration wait);
  async::Task<Result<std::string>> begin_update(rpc::Peer peer, std::string body);
  async::Task<Result<std::string>> plan_update(std::string body);
  async::Task<Result<std::string>> report_round(rpc::Peer peer, std::string body);
  async::Task<Result<std::string>> update_status(rpc::Peer peer, std::string body);
  proto::RoundOrders orders_of(const std::string& node_id) const;

  Core& core_;
  const AnswerGate gate_;
  // nullptr: everybody may read everything.
  const AccessControl* const access_;
  async::Notifier changed_;
  std::uint64_t seen_revision_ = 0;
  RoundLog log_;
  RoundTraces traces_;
};

}  // namespace rekindle::coordinator

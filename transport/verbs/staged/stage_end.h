#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "transport/registry.h"
#include "transport/verbs/device/memory_window.h"
#include "transport/verbs/link/verbs_connection.h"
#include "transport/verbs/link/verbs_wire.h"
#include "transport/verbs/staged/stage_pool.h"
#include "transport/verbs/staged/stage_wire.h"

namespace rekindle::transport::verbs {

// The source's end of one staged link, over one queue pair. It takes requests, gathers their runs
// into blocks, and answers. The puller READs the blocks.
class StageEnd {
 public:
  // Connected, receives posted, windows bound, events armed. `registry` and `pool` outlive it.
  static Result<std::shared_ptr<StageEnd>> create(Rail& rail, const LinkRequest& request,
                                                  const Session& session,
                                                  const SegmentRegistry& registry, StagePool& pool);
  ~StageEnd();  // revoked by then, or never open
  StageEnd(const StageEnd&) = delete;
  StageEnd& operator=(const StageEnd&) = delete;

  const LinkResponse& response() const { return response_; }
  LinkResponse& response() { return response_; }
  int event_fd() const { return connection_->event_fd(); }
  const Rail& rail() const { return connection_->rail(); }
  bool over() const { return ended_.load(std::memory_order_acquire) || connection_->rail_moved(); }
  // The time since the puller's last request, or since the handshake. From any thread.
  Duration idle() const;

  // The staging thread calls this. It takes the requests that have come and copies one block at
  // most. kIdle: event_fd() tells when there is more. kOver: there will never be more.
  enum class Turn { kIdle, kMore, kOver };
  Turn turn();

  // Whether the request is for the same rails of the same session. If so, the puller has left this
  // link.
  bool replaced_by(const Session& session, const Rail& rail, const LinkRequest& request) const;
  // Stops serving, for example after the puller broke the rules. over() from then on. From any
  // thread, without a system call: the owner revokes the link.
  void end(std::string_view why);
  // The steps of SourceLink. The first one waits for a turn under way, so for a copy of one block.
  bool begin_revoke();
  void post_invalidations();
  void stop(TimePoint deadline);
  void release(TimePoint deadline);

 private:
  enum class Kind : std::uint32_t { kReceive, kAnswer, kBind, kInvalidate };
  struct Slot {
    StageBlock block;
    MemoryWindow window;
    MrHandle in_domain;  // of the block, without memory windows
    ibv_mr* mr() const { return in_domain ? in_domain.get() : block.mr; }
    bool asked = false;      // a request waits here
    bool answering = false;  // its answer is under way
    StageRequest request;
  };

  StageEnd(PdHandle domain, std::unique_ptr<Connection> connection, const Session& session,
           const SegmentRegistry& registry, StagePool& pool, std::uint32_t puller_rail);
  // All are called with mutex_ held, or before other threads know of the object.
  Result<void> open(const LinkRequest& request);
  Result<void> bind_windows();
  Result<void> register_in_domain();
  bool post_receive(std::size_t slot);
  int post(Kind kind, std::size_t slot, ibv_send_wr& request);
  int poll_completions();
  // Waits for the requests that this end has posted.
  bool await_requests(TimePoint deadline);
  void complete(const ibv_wc& wc);
  void take_request(std::size_t slot, std::size_t bytes);
  void break_off(std::string_view why);
  bool serve_one();
  void serve(Slot& slot, std::size_t index);
  OpStatus gather(const StageRequest& request, std::byte* block) const;

  const SessionToken token_;
  const std::string puller_;
  const std::uint32_t puller_rail_;
  const SegmentRegistry& registry_;
  StagePool& pool_;
  // Without memory windows: other links, whose pullers may guess a key, reach nothing in it.
  PdHandle domain_;
  const std::unique_ptr<Connection> connection_;
  LinkResponse response_;
  std::atomic<bool> ended_ = false;
  std::atomic<std::int64_t> last_request_ns_ = 0;

  std::mutex mutex_;
  std::vector<Slot> slots_;  // guarded by mutex_, as are the rest
  std::size_t next_slot_ = 0;
  std::size_t outstanding_ = 0;  // requests in the send queue
  bool armed_ = false;
  bool bind_failed_ = false;
  bool revoked_ = false;
};

}  // namespace rekindle::transport::verbs

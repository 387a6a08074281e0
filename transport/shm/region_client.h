#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "transport/read_op.h"
#include "transport/shm/shm_protocol.h"
#include "transport/shm/source_mappings.h"

namespace rekindle::transport::shm {

// The reader's end of the side channel. It maps regions, and notices when keys go stale or the
// session ends. The peer's change counter is mapped: it shows without a system call whether earlier
// answers still hold. Thread-safe. A caller waits at most until its deadline.
class RegionClient {
 public:
  // `socket` is past its hello. `counter` is the change counter of the peer's registry, or invalid.
  RegionClient(UniqueFd socket, const UniqueFd& counter, std::shared_ptr<SourceMappings> mappings);
  ~RegionClient();
  RegionClient(const RegionClient&) = delete;
  RegionClient& operator=(const RegionClient&) = delete;

  struct Found {
    OpStatus status = OpStatus::kOk;  // kTimeout: no answer by the deadline, or interrupted
    std::shared_ptr<const Mapping> mapping;
  };
  Found find(RegionKey key, TimePoint deadline);

  // The peer closed its end: it is gone, or it dropped the session. Cheap enough to call once per
  // megabyte.
  bool peer_gone();
  // Tells the peer that nothing here touches its memory any more. find() fails from now on.
  void close();
  // Ends a waiting find() on any thread. Later ones do not wait either.
  void interrupt();

  // For a thread that waits for the peer's end and its own wake-ups.
  int socket_fd() const { return socket_.get(); }

 private:
  // Lets one thread at a time in. False: its turn did not come by the deadline.
  class Turn {
   public:
    Turn(RegionClient& client, TimePoint deadline);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    explicit operator bool() const { return mine_; }

   private:
    RegionClient& client_;
    bool mine_ = false;
  };
  struct Known {
    std::shared_ptr<const Mapping> mapping;
    std::uint64_t checked_at = 0;  // counter when the peer last said yes
  };
  Found ask(RegionKey key, bool want_fd, TimePoint deadline);
  Io exchange(const RegionRequest& request, RegionReply& reply, UniqueFd& fd, TimePoint deadline);
  std::uint64_t changes() const;
  bool wait(TimePoint deadline);

  const std::shared_ptr<SourceMappings> mappings_;
  UniqueFd socket_;
  UniqueFd interrupt_;  // eventfd
  void* counter_page_ = nullptr;
  std::atomic<bool> gone_ = false;
  // The holder of the turn uses the members below. This is no timed mutex, as ThreadSanitizer does
  // not know its clocks.
  std::mutex mutex_;
  std::condition_variable turn_over_;
  bool turn_taken_ = false;  // guarded by mutex_
  std::map<RegionKey, Known> known_;
  // The peer still owes an answer.
  bool out_of_step_ = false;
};

}  // namespace rekindle::transport::shm

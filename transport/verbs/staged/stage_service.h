#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "transport/registry.h"
#include "transport/verbs/device/fabric.h"
#include "transport/verbs/link/link_revocation.h"
#include "transport/verbs/staged/stage_end.h"
#include "transport/verbs/staged/stage_pool.h"

namespace rekindle::transport::verbs {

struct StageOptions {
  std::uint64_t bytes_per_device = 8 << 20;  // registered at start; 0: nothing is staged
  // The blocks of a link that was idle for this long are taken back when another link wants some.
  std::chrono::milliseconds idle_limit{10'000};
  // Some link is over(). Called on any thread, without a lock of this class.
  std::function<void()> on_over;
};

// Serves regions that a device could not register whole, through a small window that it could. One
// thread serves all links; each gets a block's worth of copying in turn.
class StageService {
 public:
  // The arguments, and everything that on_over uses, outlive the service. It outlives its links.
  // Throws when the kernel has no descriptors left.
  StageService(Fabric& fabric, const SegmentRegistry& registry, const StageOptions& options);
  ~StageService();
  StageService(const StageService&) = delete;
  StageService& operator=(const StageService&) = delete;

  bool has_window() const;  // on some device
  // kExhausted: no window, or all of it is in use.
  Result<std::unique_ptr<SourceLink>> open(Rail& rail, const LinkRequest& request,
                                           const Session& session, const ServedRegions& regions);

 private:
  class Link;
  void run();
  std::shared_ptr<StageEnd> find(std::uint64_t id) const;
  Result<std::uint64_t> add(std::shared_ptr<StageEnd> end);
  void remove(std::uint64_t id);
  void end_idle_links(const Rail& rail, const Session& session, const LinkRequest& request);

  const SegmentRegistry& registry_;
  const StageOptions options_;
  std::vector<std::unique_ptr<StagePool>> pools_;  // by Device::index()
  UniqueFd epoll_;
  UniqueFd wake_;
  mutable std::mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<StageEnd>> ends_;  // guarded by mutex_
  std::uint64_t next_id_ = 1;                                // guarded by mutex_
  std::thread thread_;
};

}  // namespace rekindle::transport::verbs

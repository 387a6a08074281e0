#pragma once

#include <chrono>
#include <memory>
#include <utility>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/pull/pull_policy.h"
#include "src/async/task.h"
#include "src/base/clock.h"
#include "src/base/digest.h"

namespace rekindle::pull {

// Lets one pull of this host at a time fetch what several pulls need. The others wait, and then
// find it in the tables (PullPlans), or fetch it themselves. Control thread only.
class FetchTurns {
  struct State;

 public:
  // A pull does not wait for another one that has made no progress for this long.
  static constexpr std::chrono::milliseconds kPatience{1000};

  explicit FetchTurns(const boost::asio::any_io_executor& executor);

  // The right to fetch. It ends with the object.
  class Turn {
   public:
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    // Another part has arrived.
    void progress(TimePoint now) { last_progress_ = now; }
    // All of it has arrived. The rest does not depend on the source.
    void arrived() { arrived_ = true; }

   private:
    friend class FetchTurns;
    Turn(std::shared_ptr<State> turns, const Digest& what)
        : turns_(std::move(turns)), what_(what) {}

    // Turns may outlive their FetchTurns.
    const std::shared_ptr<State> turns_;
    const Digest what_;
    TimePoint last_progress_ = steady_now();
    bool arrived_ = false;
  };
  // Another pull fetches `what` now.
  bool taken(const Digest& what) const;
  // Waits while another pull fetches `what`. Its progress counts as that of the caller's sources.
  // Returns as well when the caller is cancelled.
  async::Task<std::unique_ptr<Turn>> take(Digest what, Silence& silence);

 private:
  const std::shared_ptr<State> state_;
};

}  // namespace rekindle::pull

#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/trace/span.h"
#include "recovery/worker/core/worker_session.h"
#include "src/async/task.h"
#include "src/base/ids.h"
#include "src/base/numbered_log.h"

namespace rekindle::worker {

// The span of an attach, and what it needs beside the phases.
struct AttachTrace {
  trace::Context span;  // invalid: the attach is over
  trace::SpanId parent;
  // From the moment when the death of the rank's last worker was seen until the attach. If nobody
  // wanted the rank for a while, from the start of its process.
  Duration restart{};
  // The attach whose pull brings the bytes. It may be that of another rank. Invalid: not known.
  trace::Context puller;
};

// Something that happened to a worker, to an instance (then without a rank), or to a copy.
struct Event {
  // Of a worker: attach; register, wire, install, loaded (it has entered that phase); committed;
  // died, failed, detached, no_resident. Of an instance: ready, unfit, forgotten, switched,
  // not_switched. Of a copy in the
  // store: copy_rotten, copy_mended, copy_lost. Of a resident copy: resident, resident_dropped.
  std::string kind;
  std::string instance;
  std::optional<std::uint32_t> rank;
  SessionId session = 0;  // 0: of the instance
  std::uint32_t pid = 0;
  std::optional<ModelVersion> version;
  std::string rung;  // once known
  std::string why;
  std::optional<std::array<Duration, kPhaseCount>> phases;  // how long each took up to now
  // Of an attach: how long the worker's process ran before it, if known.
  std::optional<Duration> start;
  AttachTrace trace;

  std::uint64_t number = 0;  // from 1 on, without gaps
  // For people only: no decision uses it.
  std::chrono::system_clock::time_point at;
};

// Keeps the newest events of this agent's life. Control thread only.
class EventLog {
 public:
  static constexpr std::size_t kMost = 1024;

  explicit EventLog(boost::asio::any_io_executor executor) : changed_(std::move(executor)) {}

  // Sees each event when it is added.
  void tell(std::function<void(const Event&)> watcher) { watcher_ = std::move(watcher); }
  // Sets the event's number and time.
  void add(Event event);
  // The events after `number` that are still kept, oldest first, at most `most`.
  std::vector<Event> after(std::uint64_t number, std::size_t most) const {
    return events_.after(number, most);
  }
  std::uint64_t last() const { return events_.last(); }

  // Returns when there is an event after `number`, at `give_up`, or after close().
  async::Task<void> wait_after(std::uint64_t number, TimePoint give_up);
  // Ends all waits.
  void close();

 private:
  NumberedLog<Event> events_{kMost};
  bool closed_ = false;
  std::function<void(const Event&)> watcher_;
  async::Notifier changed_;
};

}  // namespace rekindle::worker

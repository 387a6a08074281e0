#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "recovery/coordinator/core/core.h"
#include "src/base/numbered_log.h"

namespace rekindle::coordinator {

// For people only: no decision uses it.
using WallTime = std::chrono::system_clock::time_point;

// Something that happened in the fleet. Fields that do not belong to the kind are empty.
struct FleetEvent {
  std::string kind;
  std::string node_id;
  std::optional<ModelVersion> id;
  PullId pull_id;
  RoundId round = 0;
  std::string instance;
  std::optional<std::uint32_t> rank;
  std::string rung;
  std::string why;
  std::uint64_t bytes = 0;
  std::uint64_t elapsed_us = 0;
  std::vector<PhaseTime> phases;

  std::uint64_t number = 0;
  WallTime at;
};

// The events of one term. It finds them by comparing the fleet with what it saw last, and takes
// those that agents tell. Nothing is durable.
class FleetWatch {
 public:
  static constexpr std::size_t kMost = 4096;

  // `term`: the incarnation of the coordinator in it.
  explicit FleetWatch(const Incarnation& term) : term_(term) {}

  void look(const Core& core, TimePoint now, WallTime at);
  // The puller is about to close it. `why`: its error; empty when the pull succeeded.
  void pull_closes(const Core& core, const PullId& id, const Incarnation& puller,
                   const std::string& why, TimePoint now, WallTime at);
  // Whether only this class finds such events. Agents tell others.
  static bool is_kind_of_coordinator(std::string_view kind);
  // Takes events that an agent numbers by itself. Those that came before are ignored.
  void told(const std::string& node_id, const Incarnation& incarnation,
            std::vector<FleetEvent> events);

  const Incarnation& term() const { return term_; }
  const NumberedLog<FleetEvent>& log() const { return log_; }

 private:
  struct SeenNode {
    Incarnation incarnation;
    std::string_view state;
    bool drained = false;
  };
  // The last event that an agent has told.
  struct Told {
    Incarnation incarnation;
    std::uint64_t number = 0;
  };
  struct SeenVersion {
    VersionState state = VersionState::kStaging;
    bool marked_ready = false;
  };
  struct SeenPull {
    std::string puller;
    ModelVersion id;
    TimePoint opened;
    std::uint64_t bytes_done = 0;
  };

  void look_at_nodes(const Core& core, TimePoint now, WallTime at);
  void look_at_node(const Member& member, std::string_view state, bool drained, WallTime at);
  void look_at_versions(const Core& core, TimePoint now, WallTime at);
  void look_at_retiring(const Core& core, WallTime at);
  void look_at_pulls(const Core& core, TimePoint now, WallTime at);
  void look_at_rounds(const Core& core, WallTime at);
  void open(const PullId& id, const Pull& pull, WallTime at);
  void end(const PullId& id, const SeenPull& pull, std::string kind, std::string why, TimePoint now,
           WallTime at);
  void add(std::string kind, WallTime at, FleetEvent event);

  const Incarnation term_;
  NumberedLog<FleetEvent> log_{kMost};
  bool begun_ = false;
  std::map<std::string, SeenNode> nodes_;
  std::map<std::string, Told> told_;
  std::map<ModelVersion, SeenVersion> versions_;
  TimePoint next_coverage_{};
  // One of them is looked at each time: whether nobody holds it is a question to every node.
  std::deque<ModelVersion> retiring_;
  std::map<PullId, SeenPull> pulls_;
  // Whether it was over.
  std::map<RoundId, bool> rounds_;
};

}  // namespace rekindle::coordinator

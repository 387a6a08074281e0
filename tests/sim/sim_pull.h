#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/sim/sim_agent.h"

namespace rekindle::sim {

// A pull with the steps of recovery/pull: open, sessions, tiles that are verified one by one,
// progress, new sources for lost ones, commit.
class SimPull {
 public:
  SimPull(SimAgent& agent, std::string model, std::optional<std::uint64_t> version, bool is_task);

  void open();
  const ModelVersion& id() const { return id_; }

 private:
  static SimPull* of(SimAgent& agent, std::uint64_t number);

  struct Source {
    SourceOffer offer;
    std::optional<std::uint64_t> session;
    std::optional<std::size_t> reading;
    bool lost = false;
    // It served wrong bytes twice.
    bool banned = false;
    std::uint32_t wrong = 0;
    std::uint32_t failures = 0;
    std::uint64_t bytes = 0;
  };

  void opened(const OpenedPull& opened);
  void take_sources(const std::vector<SourceOffer>& offers);
  void dial(Source& source);
  void read_next(Source& source);
  void got(const Incarnation& from, std::size_t tile, const Result<std::uint64_t>& content);
  void lose(Source& source);
  void progress();
  void finish(bool ok);
  std::optional<std::size_t> next_tile(const Source& source) const;
  SimAgent* host_of(const SourceOffer& offer) const;
  Copy& copy() const { return agent_.store_.at(id_); }
  bool complete() const;

  SimAgent& agent_;
  World& world_;
  const std::string model_;
  const std::optional<std::uint64_t> version_;
  const bool is_task_;
  // Answers to earlier pulls have other numbers.
  const std::uint64_t number_;
  int opens_ = 0;
  ModelVersion id_;
  Digest root_;
  PullId pull_id_;
  std::map<Incarnation, Source> sources_;
  TimePoint last_byte_{};
};

}  // namespace rekindle::sim

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "recovery/coordinator/core/types.h"

// What the core is asked and what it answers; what it remembers of a pull.
namespace rekindle::coordinator {

struct Registered {
  std::uint64_t epoch = 0;
};
struct Heartbeat {
  std::uint64_t epoch = 0;
  std::uint64_t progress = 0;  // of the working threads
  std::uint64_t store_free_bytes = 0;
  // Of the retiring versions that it was told of and lets nobody new read: who still does.
  std::map<ModelVersion, std::uint32_t> readers = {};
  std::vector<ModelVersion> failed_fetches = {};
  std::vector<ModelVersion> fetching = {};
};
struct HeartbeatAnswer {
  struct Fetch {
    ModelVersion id;
    Digest root;
    std::uint64_t max_bytes_per_second = 0;  // 0 = no cap
  };
  std::uint64_t epoch = 0;
  std::uint64_t coordinator_time_ms = 0;
  std::vector<ModelVersion> retiring;  // let nobody new read, and say who still does
  std::vector<ModelVersion> retire;    // nobody does: let go
  std::vector<Fetch> fetch;            // pull all of it and keep it
  bool drained = false;
};
struct Draining {
  std::size_t readers = 0;                // pulls that still read there
  std::vector<ModelVersion> sole_copies;  // READY versions that only drained nodes hold
};
struct OpenPullRequest {
  NodeInfo puller;
  std::string model;
  std::optional<std::uint64_t> version;  // nullopt: the newest READY one
  std::string shard;
};
struct OpenedPull {
  PullId pull_id;  // nil when queued
  ModelVersion id;
  DurableVersion version;
  std::uint64_t epoch = 0;
  Duration lease{};
  std::vector<SourceOffer> sources;  // empty, without retry_after: the puller has it all itself
  Duration retry_after{};            // > 0: no source has a free share now
};
struct PullProgress {
  PullId pull_id;
  NodeInfo puller;
  ModelVersion id;
  std::uint64_t bytes_done = 0;
  std::uint64_t bytes_total = 0;
  std::vector<SourceReport> sources;
};
struct PullProgressAnswer {
  std::vector<SourceOffer> sources;
  bool grace = false;
};
struct Pull {
  NodeInfo puller;
  ModelVersion id;
  Digest root;
  std::string shard;
  TimePoint opened;
  TimePoint last_progress;
  std::uint64_t bytes_done = 0;
  std::uint64_t bytes_total = 0;
  double bytes_per_second = 0;
  std::vector<SourceReport> reports;
  std::vector<Incarnation> sources;  // sorted; each has a share of its source
};
struct Waiting {
  Incarnation puller;
  ModelVersion id;
  std::string shard;
  TimePoint expires;  // unless it asks again
};
struct AnnounceConflict {
  ModelVersion id;
  std::string why;
  bool again = false;  // no other root: it could not be made durable now
};
struct Announced {
  Result<std::vector<AnnounceConflict>> answer;
  CommitNumber commit = 0;                 // 0: the answer holds now
  std::map<ModelVersion, Digest> waiting;  // for it, with their roots
};

}  // namespace rekindle::coordinator

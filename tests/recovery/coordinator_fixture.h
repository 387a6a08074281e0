#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "recovery/coordinator/core/core.h"
#include "tests/support/durable_core.h"
#include "tests/support/numbered_digest.h"

namespace rekindle::coordinator::testing {

using namespace std::chrono_literals;

inline const ModelVersion kV1{"qwen3", 1};
inline const ModelVersion kV2{"qwen3", 2};

// A core under virtual time, its durable state in memory.
class CoreWorld {
 public:
  explicit CoreWorld(Limits limits = {}, DurableState durable = {})
      : limits_(limits), disk(std::move(durable)) {
    restart();
  }

  // A new life of the coordinator from what is on "disk".
  void restart() {
    core.emplace(
        timing, limits_, disk,
        [this](const StateChange& change) -> Result<void> {
          if (disk_fails) return fail(ErrorCode::kExhausted, "no space left");
          change.apply_to(disk);
          ++writes;
          if (fails_after_writing) return fail(ErrorCode::kUnavailable, "the directory's fsync");
          return {};
        },
        [this] {
          PullId id;
          const std::uint64_t value = ++pull_ids_;
          std::memcpy(id.bytes.data(), &value, sizeof value);
          return id;
        });
    ASSERT_TRUE(core->start(now));
  }

  // Ticks like the daemon. The nodes in `beat` send heartbeats; all others are silent.
  void pass(Duration duration, const std::vector<NodeInfo>& beat = {}) {
    for (const TimePoint end = now + duration; now < end;) {
      now += 100ms;
      core->tick(now);
      for (const NodeInfo& node : beat) {
        EXPECT_TRUE(beat_one(node));
      }
    }
  }

  // Sends the heartbeat of a node with the room in its store.
  Result<HeartbeatAnswer> beat_one(const NodeInfo& node) {
    Heartbeat heartbeat;
    const auto free = free_bytes.find(node.node_id);
    heartbeat.store_free_bytes = free == free_bytes.end() ? 0 : free->second;
    return core->heartbeat(node.node_id, node.incarnation, heartbeat, now);
  }
  Result<HeartbeatAnswer> beat_with_readers(const NodeInfo& node, const ModelVersion& id,
                                            std::uint32_t readers) {
    return core->heartbeat(node.node_id, node.incarnation, {.readers = {{id, readers}}}, now);
  }

  NodeInfo node(const std::string& name) {
    NodeInfo info;
    info.node_id = name;
    const std::uint64_t value = ++incarnations_;
    std::memcpy(info.incarnation.bytes.data() + 8, &value, sizeof value);
    info.control_endpoint = name + ":7400";
    info.host_id = "host-" + name;
    return info;
  }
  Result<Registered> enroll(const NodeInfo& info, std::uint64_t highest_epoch = 0,
                            const std::string& domain = "") {
    return core->enroll(info, domain, highest_epoch, connection_of(info), now);
  }
  void disconnect(const NodeInfo& info) {
    core->disconnected(info.node_id, info.incarnation, connection_of(info), now);
  }
  static std::string connection_of(const NodeInfo& info) { return info.incarnation.hex(); }

  static Holding holding(const ModelVersion& id, std::uint64_t root = 1, std::uint64_t layout = 1,
                         bool complete = true, bool whole = true) {
    Holding result;
    result.id = id;
    result.root = test::numbered_digest(root, 7);
    result.layout = test::numbered_digest(layout, 9);
    result.tensor_set = test::numbered_digest(root, 8);
    result.checkpoint_bytes = result.payload_bytes = 1000;
    result.complete = complete;
    result.whole = whole;
    result.verified = complete;
    if (!complete) result.held = {{0, 5}};
    return result;
  }
  Result<std::vector<AnnounceConflict>> announce(const NodeInfo& info, std::vector<Holding> add,
                                                 bool full = false) {
    return core->announce(info.node_id, info.incarnation, 0, full, std::move(add), {}, now);
  }
  // Registers and holds a whole copy.
  NodeInfo holder(const std::string& name, const ModelVersion& id, std::uint64_t root = 1) {
    const NodeInfo info = node(name);
    EXPECT_TRUE(enroll(info));
    EXPECT_TRUE(announce(info, {holding(id, root)}));
    return info;
  }
  // Registers and holds some verified tiles of an incomplete copy.
  NodeInfo filling(const std::string& name) {
    const NodeInfo info = node(name);
    EXPECT_TRUE(enroll(info));
    EXPECT_TRUE(announce(info, {holding(kV1, 1, 1, /*complete=*/false)}));
    return info;
  }
  Result<OpenedPull> open(const NodeInfo& puller, const std::string& model,
                          std::optional<std::uint64_t> version = {}, std::string shard = "") {
    return core->open_pull({puller, model, version, std::move(shard)}, now);
  }
  Result<PullProgressAnswer> progress(const NodeInfo& puller, const OpenedPull& pull,
                                      std::vector<SourceReport> reports = {},
                                      std::uint64_t done = 0) {
    return core->pull_progress({pull.pull_id, puller, pull.id, done, 1000, std::move(reports)},
                               now);
  }
  // By the one that opened it.
  void close(const PullId& pull) {
    EXPECT_TRUE(
        core->close_pull(pull, core->pulls().table().all().at(pull).puller.incarnation, now));
  }
  // Opens a pull of the newest version and returns the names of its sources.
  std::vector<std::string> sources(const NodeInfo& puller) {
    return names(open(puller, "qwen3")->sources);
  }
  std::vector<std::string> sources(const std::string& puller) { return sources(node(puller)); }
  static std::vector<std::string> names(const std::vector<SourceOffer>& offers) {
    std::vector<std::string> result;
    for (const auto& offer : offers) result.push_back(offer.node.node_id);
    return result;
  }

  Timing timing;
  // By node id.
  std::map<std::string, std::uint64_t> free_bytes;

 private:
  Limits limits_;
  std::uint64_t pull_ids_ = 0;
  std::uint64_t incarnations_ = 0;

 public:
  DurableState disk;
  bool disk_fails = false;
  bool fails_after_writing = false;
  int writes = 0;
  TimePoint now{std::chrono::hours(1)};
  std::optional<rekindle::testing::DurableCore> core;
};

inline SourceReport report(const NodeInfo& source) {
  SourceReport result;
  result.node_id = source.node_id;
  result.incarnation = source.incarnation;
  return result;
}
inline SourceReport quarantine_report(const NodeInfo& source) {
  SourceReport result = report(source);
  result.quarantine = true;
  return result;
}
inline SourceReport failed_report(const NodeInfo& source) {
  SourceReport result = report(source);
  result.failures = 1;
  return result;
}
inline SourceReport lost_report(const NodeInfo& source) {
  SourceReport result = report(source);
  result.lost = true;
  return result;
}

// A whole copy of version 1 on "a", and a pull of it by "p".
struct RunningPull : CoreWorld {
  explicit RunningPull(Limits its_limits = {}) : CoreWorld(its_limits) {}

  Result<PullProgressAnswer> go_on(std::vector<SourceReport> reports = {}, std::uint64_t done = 0) {
    return progress(p, *pull, std::move(reports), done);
  }

  const NodeInfo a = holder("a", kV1);
  const NodeInfo p = node("p");
  const Result<OpenedPull> pull = open(p, "qwen3");
};

}  // namespace rekindle::coordinator::testing

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "src/base/clock.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"

// What the coordinator's core speaks: plain values, no protobuf, no I/O, no clock of its own.
namespace rekindle::coordinator {

struct Timing {
  Duration heartbeat_interval = std::chrono::milliseconds(250);
  Duration suspect_after = std::chrono::milliseconds(750);
  Duration dead_after = std::chrono::milliseconds(2000);  // also the grace after a start or pause
  Duration vouched_for = std::chrono::seconds(5);  // by a puller that had new bytes from a node
  Duration pull_lease = std::chrono::seconds(10);  // without progress
  Duration grant_ttl = std::chrono::seconds(60);
  Duration quarantine_first = std::chrono::seconds(10);  // doubles with each strike
  Duration quarantine_max = std::chrono::minutes(10);
  Duration lost_report = std::chrono::seconds(5);  // a source that a puller lost counts as suspect
  Duration forget_dead_after = std::chrono::minutes(10);
  Duration flap_window = std::chrono::minutes(1);       // two deaths within it are flapping
  Duration recopy_after = std::chrono::seconds(10);     // too few copies for this long
  Duration recopy_stalled = std::chrono::seconds(30);   // without progress another node gets it
  Duration recopy_avoid = std::chrono::seconds(60);     // who failed at it is not asked so soon
  Duration let_go_lasts = std::chrono::minutes(1);      // leave to let go of a copy
  Duration rank_silence = std::chrono::seconds(5);      // of a rank whose node is alive
  Duration forget_instance = std::chrono::minutes(10);  // after its last rank is gone
  Duration retire_deadline =
      std::chrono::minutes(10);  // then readers of a retired version are ended
};

struct Limits {
  std::size_t max_pullers_per_source = 8;
  std::size_t max_sources_per_pull = 16;
  std::size_t max_members = 20000;
  std::size_t max_holdings_per_member = 4096;
  std::size_t max_pulls = 20000;
  std::size_t max_waiting = 20000;
  std::size_t max_spanning_instances = 65536;  // with ranks on more than one node
  std::size_t max_instances_per_node = 4096;   // with ranks on this node only
  std::uint32_t max_world = 4096;
  std::uint32_t replicas = 0;  // whole copies that are kept of a version that does not say
  std::uint64_t recopy_bytes_per_second = std::uint64_t{256} << 20;  // of one copy; 0 = no cap
};

struct NodeInfo {
  std::string node_id;
  Incarnation incarnation;
  std::string control_endpoint;
  std::string host_id;
};

enum class NodeState { kAlive, kSuspect, kDead };

// One (version, layout) that a node holds.
struct Holding {
  ModelVersion id;
  Digest root;
  Digest tensor_set;
  Digest layout;
  std::uint64_t payload_bytes = 0;
  std::uint64_t checkpoint_bytes = 0;
  bool complete = false;  // it has every tile of the layout
  bool whole = false;     // the layout covers every tensor
  bool verified = false;  // its bytes were compared with their digests on this node
  std::vector<std::pair<std::uint32_t, std::uint32_t>> held;  // runs of tiles, when not complete
  // Of a layout that does not cover every tensor: runs of tiles that lie in it as a whole (all of
  // them, or fewer), and how many tiles the checkpoint has; 0: the node does not say.
  std::vector<std::pair<std::uint32_t, std::uint32_t>> covers;
  std::uint32_t checkpoint_tiles = 0;

  // Readers may be sent to it, and others may rely on it.
  bool counts() const { return complete && verified; }
};
struct HoldingKey {
  ModelVersion id;
  Digest layout;
  auto operator<=>(const HoldingKey&) const = default;
};

// The durable part. A version has one root for ever. A retired version is kept as a tombstone, so
// that a late copy cannot bring it back; the oldest tombstones of a model are dropped below its
// retention watermark.
struct DurableVersion {
  Digest root;
  Digest tensor_set;
  std::uint64_t checkpoint_bytes = 0;
  bool retiring = false;
  std::optional<std::uint32_t> replicas = std::nullopt;  // nullopt: as the coordinator says
  // It has been READY since it was published: `latest` goes back behind it only by its retirement.
  bool ready = false;
  bool operator==(const DurableVersion&) const = default;
};
struct DurableState {
  std::uint64_t epoch = 0;
  std::map<ModelVersion, DurableVersion> versions;
  // The retention watermark of a model: a version up to it that has no entry counts as retired.
  std::map<std::string, std::uint64_t> retired_through;
  std::set<std::string> drained;  // node ids
  bool operator==(const DurableState&) const = default;
};
// What is to be written: each member replaces what is stored under the same name.
struct StateChange {
  std::optional<std::uint64_t> epoch;
  std::map<ModelVersion, std::optional<DurableVersion>> versions;  // nullopt: erased
  std::map<std::string, std::uint64_t> retired_through;
  std::map<std::string, bool> drained;

  bool empty() const {
    return !epoch && versions.empty() && retired_through.empty() && drained.empty();
  }
  void apply_to(DurableState& state) const;
};
// Commits end in the order of their numbers; 0 is none.
using CommitNumber = std::uint64_t;
struct CommitBatch {
  CommitNumber number = 0;
  StateChange change;
};
// An answer that holds once `commit` is durable (0: it holds now). When that commit fails, its
// error is the answer.
template <typename T>
struct Durably {
  Result<T> answer;
  CommitNumber commit = 0;
};

struct GrantTerms {
  Incarnation puller;
  Incarnation source;
  Digest root;
  std::uint64_t expiry_ms = 0;             // on the coordinator's monotonic clock
  std::uint64_t serial = 0;                // never reused in one life of the coordinator
  std::uint64_t epoch = 0;                 // of the coordinator that gives it
  std::uint64_t max_bytes_per_second = 0;  // 0 = no cap
};
struct SourceOffer {
  NodeInfo node;
  Digest layout;
  bool complete = false;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> held;
  std::uint64_t payload_bytes = 0;
  GrantTerms grant;
};

struct SourceReport {
  std::string node_id;
  Incarnation incarnation;
  std::uint64_t bytes = 0;
  double goodput_bytes_per_second = 0;
  std::uint32_t failures = 0;
  bool lost = false;
  bool quarantine = false;  // it served wrong bytes twice
  std::string cause;
};

}  // namespace rekindle::coordinator

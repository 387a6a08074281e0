#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"

// Values that the units of the coordinator's core share. The core knows no protobuf, does no I/O
// and has no clock of its own.
namespace rekindle::coordinator {

struct Timing {
  Duration heartbeat_interval = std::chrono::milliseconds(250);
  Duration suspect_after = std::chrono::milliseconds(750);
  // Also the length of the grace after a start or a long pause.
  Duration dead_after = std::chrono::milliseconds(2000);
  // A silent node is not dead for this long after a puller has received bytes from it.
  Duration vouched_for = std::chrono::seconds(5);
  // A pull ends after this long without a progress report.
  Duration pull_lease = std::chrono::seconds(10);
  Duration grant_ttl = std::chrono::seconds(60);
  // Doubles with each strike, up to the maximum.
  Duration quarantine_first = std::chrono::seconds(10);
  Duration quarantine_max = std::chrono::minutes(10);
  // A source that a puller lost counts as suspect for this long.
  Duration lost_report = std::chrono::seconds(5);
  Duration forget_dead_after = std::chrono::minutes(10);
  // A node id that dies twice within this time is flapping.
  Duration flap_window = std::chrono::minutes(1);
  // A missing copy is made after this long.
  Duration recopy_after = std::chrono::seconds(10);
  // A copy without progress for this long goes to another node.
  Duration recopy_stalled = std::chrono::seconds(30);
  // A node that failed to make a copy is not asked again for this long.
  Duration recopy_avoid = std::chrono::seconds(60);
  Duration eviction_permit = std::chrono::minutes(1);
  // A rank of a live node is lost after this long without a report.
  Duration rank_silence = std::chrono::seconds(5);
  // An instance is forgotten this long after its last rank was lost.
  Duration forget_instance = std::chrono::minutes(10);
  // A claim that no node holds anything of is forgotten after this long.
  Duration forget_open_claim = std::chrono::hours(24);
  // Readers of a retired version may go on for this long.
  Duration retire_deadline = std::chrono::minutes(10);
};

struct Limits {
  std::size_t max_pullers_per_source = 8;
  std::size_t max_sources_per_pull = 16;
  // A pull of a joint publication gets all of its parts, and with them up to so many sources. A
  // puller reads from no more than these (transport::kMaxSources).
  std::size_t max_sources_with_parts = 256;
  std::size_t max_members = 20000;
  std::size_t max_holdings_per_member = 4096;
  // Of what a node announces: the runs of tiles and the parts of its holdings, in memory.
  std::size_t max_holding_bytes_per_member = std::size_t{32} << 20;
  // Versions that one claimant has published and that have never been READY.
  std::size_t max_open_claims = 256;
  // Versions that the members of one party have announced, and that no publisher has claimed.
  std::size_t max_announced_versions = 1024;
  std::size_t max_pulls = 20000;
  std::size_t max_waiting = 20000;
  // Instances with ranks on more than one node.
  std::size_t max_spanning_instances = 65536;
  // Instances with ranks on this node only.
  std::size_t max_instances_per_node = 4096;
  std::uint32_t max_world = 4096;
  // Whole copies to keep of a version whose publisher gave no number.
  std::uint32_t replicas = 0;
  // For each copy that is made; 0 is no cap.
  std::uint64_t recopy_bytes_per_second = std::uint64_t{256} << 20;
};

struct NodeInfo {
  std::string node_id;
  Incarnation incarnation;
  std::string control_endpoint;
  std::string host_id;
  // A party that begins with it is a host.
  static constexpr std::string_view kHostParty = "host ";
  // The names that the process has proven, and who is responsible for what it reports: its first
  // certified name, or the host of a process that shares a secret with all others.
  std::vector<std::string> principals = {};
  std::string party = {};
  // Its certificate is for this node id alone.
  bool owns_node_id = false;

  // Processes of a trusted network without names answer for themselves.
  std::string responsible() const { return party.empty() ? "process " + incarnation.hex() : party; }
};

// Milliseconds on the coordinator's monotonic clock, as grants carry them.
inline std::uint64_t clock_ms(TimePoint now) {
  return static_cast<std::uint64_t>(milliseconds(now.time_since_epoch()));
}

}  // namespace rekindle::coordinator
